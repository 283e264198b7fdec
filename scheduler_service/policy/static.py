"""Windows that look at nothing: the whole block, or its first k drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.base import DraftedBatch, VerifyPolicy


class StaticPolicy(VerifyPolicy):
    """The same window for every row, in every step."""

    def __init__(self, window: int | None = None) -> None:
        """`window`: drafts verified of each row; None: the whole block."""
        self._window = window

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        """As many as the row's limit allows."""
        return usable if self._window is None else np.minimum(usable, self._window)
