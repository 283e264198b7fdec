"""The truth: bit by bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def mask_logits(logits: npt.NDArray[np.float32], masks: npt.NDArray[np.uint32]) -> None:
    """Changes `logits` [n, V] in place (see the package)."""
    for row, mask in zip(logits, masks, strict=True):
        for token_id in range(len(row)):
            if not int(mask[token_id // 32]) >> (token_id % 32) & 1:
                row[token_id] = -np.inf
