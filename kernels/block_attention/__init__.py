"""Attention of DSpark draft blocks: bidirectional inside a block, causal to the pages before it."""
