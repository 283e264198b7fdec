"""The rule of `compact` by default: causal, but the lagged budget where an early stop would fall short.

Both rules are lossless, and which one is used follows from older confidences and the costs alone, so it is known before
the step's drafts are drawn. Where costs rise smoothly the causal rule is as good as a global search, and it sees the
confidences of now. Where they jump (the tiers of captured graphs) it stops before the jump, though the tokens behind it
would be free: older confidences show that, and then their budget is spent on the best drafts of now.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.base import DraftedBatch
from scheduler_service.policy.causal import num_until_drop
from scheduler_service.policy.lagged import OlderPolicy
from scheduler_service.policy.survival import admission_order, lens_of, throughput


class AdaptivePolicy(OlderPolicy):
    """Causal or lagged, step by step."""

    def lagged_count(self, older: npt.NDArray[np.float64]) -> int | None:
        """See `OlderPolicy`."""
        count = int(np.argmax(older))
        return count if count > num_until_drop(older) else None  # else an early stop finds the optimum

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        """Windows by the rule that older confidences favour."""
        count = self.lagged_count(self.older_throughput(batch))
        rows, gains = admission_order(survival * batch.weights[:, None])
        if count is None:
            step_ns = self._costs.total_ns(batch.work, batch.contexts_of(rows))
            count = num_until_drop(throughput(gains, batch.plain_gain, step_ns))
        return lens_of(rows[: batch.within_budget(count)], survival.shape[0])
