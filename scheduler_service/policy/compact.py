"""Verify lengths from current confidences and the cost table: the causal form of DSpark's Algorithm 1.

Glossary. *Confidence* c[r, k]: probability that draft k of row r survives given that all before it did. *Survival*
a[r, k] = c[r, 1] · … · c[r, k]. Drafts are admitted in descending survival while the expected tokens per second
Θ = (emitting rows + Σ survival of the admitted) / T keep rising; the first one that does not raise Θ ends the step's
window. The stop is what makes this lossless: a draft is admitted on the strength of itself and of what ranks above it,
never because something behind it looks good (DSpark, arXiv 2607.05147, Algorithm 1 and Appendix A).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.cost_table import CostTable
from scheduler_service.policy.base import DraftedBatch


def survivals(confidences: npt.NDArray[np.float32], max_drafts: list[int]) -> npt.NDArray[np.float64]:
    """Survival of each draft, [rows, drafts]; 0 beyond a row's limit.

    A confidence that is NaN or outside [0, 1] ends its row's window from its position on (design 5.8).
    """
    is_valid = (confidences >= 0) & (confidences <= 1)  # NaN compares false
    is_allowed = np.arange(confidences.shape[1]) < np.asarray(max_drafts)[:, None]
    usable = np.where(is_valid & is_allowed, confidences, 0.0)
    return np.cumprod(usable, axis=1, dtype=np.float64)


def admission_order(
    survival: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Drafts by survival descending, then position ascending, then row ascending, and their survivals.

    Returns ([candidates] row indices, [candidates] survivals). Within a row survivals never rise, so taking a prefix of
    this order takes a prefix of every row.
    """
    num_rows = survival.shape[0]
    by_position = survival.T.ravel()  # position-major: a stable sort then breaks ties by position, then row
    order = np.argsort(-by_position, kind="stable")
    ordered = by_position[order]
    count = int(np.count_nonzero(ordered))
    return order[:count] % num_rows, ordered[:count]


def num_admitted(ordered: npt.NDArray[np.float64], num_emitting: int, step_ns: npt.NDArray[np.float64]) -> int:
    """Drafts admitted from the head of the order: those before the first that does not raise Θ.

    `step_ns`: [candidates + 1] cost of the whole step with 0, 1, 2 … drafts verified.
    """
    expected = num_emitting + np.concatenate(([0.0], np.cumsum(ordered)))
    throughput = expected / step_ns
    drops = np.flatnonzero(throughput[1:] <= throughput[:-1])
    return int(drops[0]) if drops.size else ordered.size


class CompactPolicy:
    """Causal Algorithm 1 over a measured cost table."""

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs

    def verify_lens(self, batch: DraftedBatch) -> list[int]:
        """Lengths that maximise expected tokens per second, as far as causality allows."""
        num_rows = len(batch.max_drafts)
        rows, ordered = admission_order(survivals(batch.confidences, batch.max_drafts))
        step_ns = self._costs.total_ns(batch.num_tokens, ordered.size, num_rows)
        count = num_admitted(ordered, batch.num_emitting, step_ns)
        lens: list[int] = np.bincount(rows[:count], minlength=num_rows).tolist()
        return lens
