"""A cost table of token rows and drafted rows as the costs of a policy; context and rows are not counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.cost_table import CostTable
from scheduler_service.policy.base import StepWork


@dataclass(frozen=True)
class TableCosts:
    """T = δ(drafted rows) + θ(token rows)."""

    table: CostTable

    def total_ns(self, work: StepWork, contexts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See `StepCosts`."""
        return self.table.total_ns(work.num_tokens, contexts.size, work.num_drafted)
