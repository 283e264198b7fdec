"""What confidences say of drafts: the arithmetic that scheduler and drafter share, so that both get the same bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def corrected(confidences: npt.NDArray[np.float32], odds: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """[rows, drafts] confidences whose odds are multiplied by `odds`; what is no probability stays none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = confidences * odds
        result: npt.NDArray[np.float32] = (scaled / (1.0 - confidences + scaled)).astype(np.float32)
    return result


def survivals(confidences: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """[rows, drafts] probability that a draft and all before it survive; 0 from the first confidence on that is NaN or
    outside [0, 1]."""
    is_usable = np.logical_and.accumulate((confidences >= 0) & (confidences <= 1), axis=1)  # NaN compares false
    return np.cumprod(np.where(is_usable, confidences, 0.0), axis=1, dtype=np.float64)
