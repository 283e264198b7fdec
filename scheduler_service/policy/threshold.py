"""Windows that end before the first confidence below a constant. For study: it knows neither cost nor load."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.base import DraftedBatch, VerifyPolicy


class ThresholdPolicy(VerifyPolicy):
    """Lossless: the confidence that ends a window was known before the draft it keeps out."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: smallest confidence that is verified; 0 verifies all."""
        self._threshold = threshold

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        """Drafts before the first unsure one."""
        return np.minimum(usable, confident_lens(batch.confidences, self._threshold))


def confident_lens(confidences: npt.NDArray[np.float32], threshold: float) -> npt.NDArray[np.intp]:
    """[rows] leading drafts with confidences of at least `threshold`."""
    is_sure = confidences >= np.float32(threshold)
    lens: npt.NDArray[np.intp] = np.where(is_sure.all(axis=1), confidences.shape[1], is_sure.argmin(axis=1))
    return lens
