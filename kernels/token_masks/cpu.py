"""numpy: one pass over the bits and one over the logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def mask_logits(logits: npt.NDArray[np.float32], masks: npt.NDArray[np.uint32]) -> None:
    """Changes `logits` [n, V] in place (see the package)."""
    as_bytes = masks.astype("<u4", copy=False).view(np.uint8)
    is_banned = np.unpackbits(~as_bytes, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    np.copyto(logits, np.float32(-np.inf), where=is_banned)
