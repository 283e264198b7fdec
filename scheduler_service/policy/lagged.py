"""The lagged rule of `compact`: the budget from older confidences, the windows from current ones.

The budget K maximises Θ over *all* sizes, so it crosses jumps of the cost that stop the causal rule. That is lossless
because nothing of the current block enters it: it reads confidences of earlier steps only, and a position drafted again
is drawn with fresh noise (design 5.5). The step then verifies the K best drafts by current survival; whether a draft is
among them is settled by itself and by what ranks above it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.base import DraftedBatch, StepCosts, VerifyPolicy
from scheduler_service.policy.survival import admission_order, lens_of, survivals, throughput, usable_lens

_LOOK_BACK = 8
"""Steps through which an older block of a row is looked for: rows are not drafted in every step."""
_MEMORY = 0.98
"""Weight that the running mean keeps from step to step."""


class _Step(NamedTuple):
    index_of: dict[Hashable, int]
    confidences: npt.NDArray[np.float32]


class OlderPolicy(VerifyPolicy):
    """A rule that looks at confidences at least `budget_lag` steps old."""

    def __init__(self, costs: StepCosts, budget_lag: int = 1, *, settles_budget: bool = False) -> None:
        """`budget_lag`: at least 1; 2 when steps are chained without waiting for the host. `settles_budget`: whether
        others may choose the windows where older confidences settle the budget."""
        self._costs, self._older = costs, OlderConfidences(budget_lag)
        self.settles_budget = settles_budget
        self._prepared: npt.NDArray[np.float64] | None = None

    def prepare(self, batch: DraftedBatch) -> None:
        """See `VerifyPolicy`."""
        self._prepared = self._look_back(batch)

    def budget(self, batch: DraftedBatch) -> int | None:
        """See `VerifyPolicy`."""
        if self._prepared is None:
            self.prepare(batch)
        assert self._prepared is not None
        count = self.lagged_count(self._prepared) if self.settles_budget else None
        return None if count is None else batch.within_budget(count)

    def spent(self, batch: DraftedBatch) -> None:
        """See `VerifyPolicy`."""
        self._prepared = None
        self._older.add(batch)

    @abstractmethod
    def lagged_count(self, older: npt.NDArray[np.float64]) -> int | None:
        """Drafts to admit by Θ of older confidences (`older_throughput`); None where that is for current ones."""

    def older_throughput(self, batch: DraftedBatch) -> npt.NDArray[np.float64]:
        """Θ with the first 0, 1 … n drafts admitted, as older confidences have it: known before this step's drafts.

        Ask once a step: the step's own confidences are old for the next."""
        older, self._prepared = self._prepared, None
        if older is None:
            older = self._look_back(batch)
        self._older.add(batch)
        return older

    def _look_back(self, batch: DraftedBatch) -> npt.NDArray[np.float64]:
        confidences = self._older.of(batch)
        survival = survivals(confidences, usable_lens(confidences, batch.max_drafts).lens)
        rows, gains = admission_order(survival * batch.weights[:, None])
        return throughput(gains, batch.plain_gain, self._costs.total_ns(batch.work, batch.contexts_of(rows)))


class LaggedPolicy(OlderPolicy):
    """Budget by global search over older confidences."""

    def lagged_count(self, older: npt.NDArray[np.float64]) -> int:
        """See `OlderPolicy`."""
        return int(np.argmax(older))

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        """The drafts of highest survival, as many as the budget allows."""
        budget = self.lagged_count(self.older_throughput(batch))
        rows, _ = admission_order(survival * batch.weights[:, None])
        return lens_of(rows[: batch.within_budget(budget)], survival.shape[0])


class OlderConfidences:
    """Blocks of the last steps, and the running mean for rows that have none."""

    def __init__(self, lag: int) -> None:
        """`lag`: steps until a block may be looked at, at least 1."""
        self._lag = lag
        self._steps: deque[_Step] = deque(maxlen=lag - 1 + _LOOK_BACK)
        self._mean = _MeanConfidence()
        self._latest: DraftedBatch | None = None
        """Added, but not looked at yet: there is more time before the next step than in this one."""

    def add(self, batch: DraftedBatch) -> None:
        """Takes in a step, once everything that it may not decide has been decided."""
        self._take_in()
        self._latest = batch

    def _take_in(self) -> None:
        batch, self._latest = self._latest, None
        if batch is None:
            return
        self._steps.append(_Step({key: row for row, key in enumerate(batch.row_keys)}, batch.confidences))
        if len(self._steps) >= self._lag:
            self._mean.add(self._steps[-self._lag].confidences)  # old enough when the next step is chosen

    def of(self, batch: DraftedBatch) -> npt.NDArray[np.float32]:
        """[drafted rows, drafts] of each row's newest block that is old enough, else the running mean."""
        self._take_in()
        num_rows, num_drafts = batch.confidences.shape
        older = np.tile(self._mean.of(num_drafts), (num_rows, 1))
        is_missing = np.ones(len(batch.row_keys), np.bool_)
        old_enough = list(self._steps)[: max(0, len(self._steps) - self._lag + 1)]
        for step in reversed(old_enough):
            if not is_missing.any():
                break
            indices = np.array([step.index_of.get(key, -1) for key in batch.row_keys])
            rows = np.flatnonzero(is_missing & (indices >= 0))
            shared = min(num_drafts, step.confidences.shape[1])  # blocks may differ in length from step to step
            older[rows, :shared] = step.confidences[indices[rows], :shared]
            is_missing[rows] = False
        return older


class _MeanConfidence:
    """Mean confidence by position over steps, older ones fading."""

    def __init__(self) -> None:
        self._sums, self._counts = np.zeros(0), np.zeros(0)

    def add(self, confidences: npt.NDArray[np.float32]) -> None:
        """Takes in a step; [rows, drafts]. Unusable confidences are left out."""
        num_drafts = confidences.shape[1]
        if num_drafts > self._sums.size:
            more = (0, num_drafts - self._sums.size)
            self._sums, self._counts = np.pad(self._sums, more), np.pad(self._counts, more)
        is_valid = (confidences >= 0) & (confidences <= 1)
        self._sums *= _MEMORY
        self._counts *= _MEMORY
        self._sums[:num_drafts] += np.where(is_valid, confidences, 0.0).sum(axis=0)
        self._counts[:num_drafts] += is_valid.sum(axis=0)

    def of(self, num_drafts: int) -> npt.NDArray[np.float32]:
        """[num_drafts]; 1 where nothing was seen, so that a first step is budgeted whole."""
        mean = np.ones(num_drafts, np.float32)
        shared = min(num_drafts, self._sums.size)
        counts = self._counts[:shared]
        np.divide(self._sums[:shared], counts, out=mean[:shared], where=counts > 0, casting="same_kind")
        return mean
