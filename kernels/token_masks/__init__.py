"""Masks of tokens, applied to rows of the target's logits: what is not allowed gets -inf.

`mask_logits(logits, masks)` in `reference.py` and `cpu.py`, in place. logits [n, V] float32; masks [n, ceil(V / 32)]
uint32: bit t % 32 of word t // 32 allows token t.
"""
