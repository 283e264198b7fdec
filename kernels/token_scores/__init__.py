"""Log-probabilities of chosen tokens in the target's own distribution: no temperature, no filter, no control.

`token_score(logits, token_id, num_top)` in `reference.py` and `cpu.py`; logits [V] float32.
"""

from __future__ import annotations

from typing import NamedTuple


class TokenScore(NamedTuple):
    """How likely a token was, and which ones were the likeliest at its place."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 for the likeliest: one more than the tokens of a larger logit."""
    top_ids: tuple[int, ...]
    """The likeliest tokens, the likeliest first, the lower id first of equals."""
    top_logprobs: tuple[float, ...]
