"""The truth: a sorted row in double precision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.token_scores import TokenScore


def token_score(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenScore:
    """Score of a token in one row [V], with the `num_top` likeliest tokens."""
    values = logits.astype(np.float64)
    logprobs = values - values.max() - np.log(np.exp(values - values.max()).sum())
    top_ids = np.argsort(-logits, kind="stable")[:num_top]
    rank = 1 + int((logits > logits[token_id]).sum())
    return TokenScore(float(logprobs[token_id]), rank, tuple(top_ids.tolist()), tuple(logprobs[top_ids].tolist()))
