"""Attention over K/V pages: the target's rows, and the write of a drafter's context."""
