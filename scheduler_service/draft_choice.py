"""The drafts of highest expected throughput, given what each is expected to bring and what steps cost.

The gain of a drafted step is the time that plain decoding would have needed for the tokens it adds, less what the step
takes longer: λ · Σ accepted − (T_drafted − T_plain), with λ the time of a plain token at this batch size. Of the drafts
as many are counted as a policy would verify of them together: the likeliest, up to the highest throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scheduler_service.draft_gate import GateCosts, StepShape
from scheduler_service.draft_history import Floats, Ints
from scheduler_service.policy.base import StepWork
from scheduler_service.step_times import StepTimes


class DraftChoice(NamedTuple):
    """What may be drafted, and what that is expected to bring."""

    gain_ns: float
    num_slots: int
    rows: list[int]
    """Indices of the candidates."""
    num_accepted: float = 0.0
    """Drafts expected to be committed."""


NO_CHOICE = DraftChoice(0.0, 0, [])


class _Cut(NamedTuple):
    rate: float
    """Tokens per nanosecond."""
    num_rows: int
    num_accepted: float
    added_ns: float


class StepValue:
    """Values drafts of one step."""

    def __init__(self, costs: GateCosts, times: StepTimes, shape: StepShape, num_candidates: int, block: int) -> None:
        """`shape` has decode rows; of each of `num_candidates` up to `block` slots may be drafted."""
        self._costs, self._num_decoding = costs, shape.num_decoding
        self._drafted_factor = times.drafted
        self.plain_ns = plain_ns(costs, shape) * times.plain
        """The decode rows alone."""
        self._waiting_ns = self.plain_ns * (times.drafted / times.plain - 1.0)
        contexts = np.full(num_candidates * block, shape.decode_context / shape.num_decoding)
        step_ns = costs.step_ns(StepWork(shape.num_rows, 0, shape.num_tokens, shape.num_context), contexts)
        self._verify_ns: Floats = (step_ns - step_ns[0]) * times.drafted
        """[drafts + 1] what verifying so many drafts adds to the target's pass."""
        self._fixed_ns: dict[int, Floats] = {}
        """By slots: what drafting a few numbers of the candidates costs."""

    def best(self, survivals: Floats, sizes: Sequence[int]) -> DraftChoice:
        """The rows and slots of highest expected throughput. `survivals`: [candidates, block] of each draft.

        For each block size the rows in order of what they bring, cut at a few numbers of rows; of their drafts the
        likeliest are verified, as many as throughput gains by.
        """
        best, best_rate = NO_CHOICE, self._num_decoding / self.plain_ns
        counts = np.array(_few_up_to(survivals.shape[0]))
        for num_slots in sizes:
            own = survivals[:, :num_slots]
            by_worth = np.argsort(-own.sum(axis=1), kind="stable")
            if num_slots not in self._fixed_ns:
                self._fixed_ns[num_slots] = self._draft_ns(counts, num_slots)
            cut = self._cut(own[by_worth], counts, self._fixed_ns[num_slots])
            if cut.rate > best_rate:
                gain_ns = self._saved_ns(cut.num_accepted) - cut.added_ns
                rows = by_worth[: cut.num_rows].tolist()
                best, best_rate = DraftChoice(gain_ns, num_slots, rows, cut.num_accepted), cut.rate
        return best

    def of_rows(self, survivals: Floats, rows: list[int], num_slots: int) -> DraftChoice:
        """What drafting just these rows would bring."""
        counts = np.array([len(rows)])
        fixed_ns = self._draft_ns(counts, num_slots)
        cut = self._cut(survivals[rows, :num_slots], counts, fixed_ns)
        # Where nothing would be verified, drafting is paid for all the same.
        gain_ns = max(self._saved_ns(cut.num_accepted) - cut.added_ns, -float(fixed_ns[0]))
        return DraftChoice(gain_ns, num_slots, rows, cut.num_accepted)

    def _cut(self, survivals: Floats, counts: Ints, fixed_ns: Floats) -> _Cut:
        """The best of the numbers of rows `counts`, the first rows of `survivals`: [rows, slots]; `fixed_ns` is what
        drafting each number of them costs."""
        num_slots = survivals.shape[1]
        flat = survivals.ravel()
        order = np.argsort(-flat, kind="stable")
        is_inside = (order // num_slots) < counts[:, None]
        accepted = np.cumsum(np.where(is_inside, flat[order], 0.0), axis=1)
        added_ns = self._verify_ns[np.cumsum(is_inside, axis=1)] + fixed_ns[:, None]
        rates = (self._num_decoding + accepted) / (self.plain_ns + added_ns)
        best = int(np.argmax(rates))
        return _Cut(
            float(rates.ravel()[best]),
            int(counts[best // rates.shape[1]]),
            float(accepted.ravel()[best]),
            float(added_ns.ravel()[best]),
        )

    def _saved_ns(self, num_accepted: float) -> float:
        return self.plain_ns / self._num_decoding * num_accepted

    def _draft_ns(self, counts: Ints, num_slots: int) -> Floats:
        """[counts] what a step takes longer for drafting so many rows, whatever is verified."""
        draft_ns = np.array([self._costs.draft_ns(count, num_slots) for count in counts.tolist()])
        return draft_ns * self._drafted_factor + self._waiting_ns


def plain_ns(costs: GateCosts, shape: StepShape) -> float:
    """The decode rows of a step alone, plainly: what a token costs does not depend on the prefill beside it."""
    return costs.plain_ns(shape.num_decoding, shape.num_decoding, shape.decode_context)


def _few_up_to(count: int) -> list[int]:
    """A few numbers from 1 to `count`, both ends included."""
    few, number = [], 1
    while number < count:
        few.append(number)
        number += max(1, number // 2)
    return [*few, count] if count else []
