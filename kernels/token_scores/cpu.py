"""numpy: single-precision exponentials, double-precision sums, and no sort of a vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.token_scores import TokenScore


def token_score(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenScore:
    """Score of a token in one row [V], with the `num_top` likeliest tokens."""
    best = logits.max()
    log_total = float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))
    chosen = logits[token_id]
    top_ids = _top_ids(logits, min(num_top, logits.size))
    return TokenScore(
        float(chosen) - log_total,
        1 + int(np.count_nonzero(logits > chosen)),
        tuple(top_ids.tolist()),
        tuple((logits[top_ids].astype(np.float64) - log_total).tolist()),
    )


def _top_ids(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest logits, largest first, the lower id first of equals."""
    if count == 0:
        return np.zeros(0, np.int64)
    last = logits.size - count
    ids = np.flatnonzero(logits >= np.partition(logits, last)[last])
    return ids[np.argsort(-logits[ids], kind="stable")][:count]
