"""The causal rule of `compact`: DSpark's Algorithm 1 with its early stop, on current confidences.

Drafts are admitted in descending survival while the expected tokens per second Θ = (emitting rows + Σ survival of the
admitted) / T keep rising; the first one that does not raise Θ ends the step's window. The stop is what makes this
lossless: a draft is admitted on the strength of itself and of what ranks above it, never because something behind it
looks good (DSpark, arXiv 2607.05147, Algorithm 1 and Appendix A). Its price: where T jumps, it stops before the jump
even when drafts behind it would be free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.base import DraftedBatch, StepCosts, VerifyPolicy
from scheduler_service.policy.survival import admission_order, lens_of, throughput


class CausalPolicy(VerifyPolicy):
    """Algorithm 1 over measured costs."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        """Windows that maximise expected tokens per second, as far as causality allows."""
        rows, gains = admission_order(survival * batch.weights[:, None])
        step_ns = self._costs.total_ns(batch.work, batch.contexts_of(rows))
        count = num_until_drop(throughput(gains, batch.plain_gain, step_ns))
        return lens_of(rows[: batch.within_budget(count)], survival.shape[0])


def num_until_drop(theta: npt.NDArray[np.float64]) -> int:
    """Candidates before the first that does not raise Θ; `theta`: [candidates + 1]."""
    does_not_raise = np.flatnonzero(~(theta[1:] > theta[:-1]))
    return int(does_not_raise[0]) if does_not_raise.size else theta.size - 1
