"""Never slower than not speculating: what is drafted is what history says will pay, and trying is on a budget.

The gain of a drafted step is the time that plain decoding would have needed for the tokens it adds, less what the step
takes longer: λ · Σ accepted − (T_drafted − T_plain), with λ the time of a plain token at this batch size. Expected
lengths come from earlier rounds (`draft_history`), times from the cost model, each corrected by what steps really took
(`step_times`): plain steps are chained and cost less than calls made one by one, drafted steps wait for the scheduler
twice.

*The account* bounds the loss. It is kept in plain steps: every step adds `probe_share`, every drafted step the gain
that was measured. While it is empty nothing is drafted; a probe (a row drafted to learn whether that would pay) needs
its predicted loss on it. So all time lost to drafting is at most the first credit + `probe_share` of the steps, but for
one step, however wrong the estimates are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from scheduler_service.draft_gate import (
    NOTHING,
    Candidate,
    DraftDecision,
    DraftedRound,
    DraftGate,
    GateCosts,
    StepShape,
)
from scheduler_service.draft_history import EngineHistory, Expectation, RowHistory
from scheduler_service.step_times import OUTLIER, StepTimes

_FIRST_CREDIT = 4.0
"""Plain steps' worth of time that may be lost before anything has paid."""
_MAX_CREDIT = 64.0
_ENTRY = 0.9
"""Share of its expected accepted length that a row not drafted in the last step is judged by: it must pay clearly to
start, and only just to go on."""
_MAX_PROBES = 2
"""Rows probed in a step in which nothing else is drafted."""
_FIRST_AUDIT = 16
"""Drafted steps until plain steps are measured again; then twice as many each time."""
_MAX_AUDIT = 1024
_AUDIT_STEPS = 4
_PROBE_HORIZON = 8
"""Steps within which a probe's loss must come back if the rows are as good as they are hoped to be."""
_PROBE_PAUSE = 4
"""Steps until rows are looked at again when none was worth a probe."""
_MAX_PROBE_PAUSE = 64
"""Steps between probes that led to nothing, at most: the pause doubles with each."""


@dataclass(frozen=True)
class GuardOptions:
    """What the guard can be told."""

    probe_share: float = 0.01
    """Share of the time that may be lost to learning whether drafting would pay."""
    margin: float = 0.02
    """Least predicted gain, in plain steps, for which a step drafts."""


class _Row(NamedTuple):
    history: RowHistory
    max_drafts: int
    expected: Expectation


class _Choice(NamedTuple):
    gain_ns: float
    num_slots: int
    rows: list[int]


class Guard(DraftGate):
    """The gate of scheduled modes."""

    def __init__(self, costs: GateCosts, block_sizes: Sequence[int], options: GuardOptions | None = None) -> None:
        """`block_sizes`: numbers of slots that may be drafted, the drafter's whole block among them."""
        self._costs, self._sizes, self._options = costs, sorted(block_sizes), options or GuardOptions()
        self._engine = EngineHistory(self._sizes[-1])
        self._correction = StepTimes()
        self.account = _FIRST_CREDIT
        """Time that may still be lost, in plain steps."""
        self._is_drafting = False
        self._num_steps = self._no_probe_before = 0
        self._pause = 1
        self._until_audit = self._audit_interval = _FIRST_AUDIT
        self._audit_left = _AUDIT_STEPS
        """Plain steps to come that are measured, before anything was drafted to begin with."""

    def new_history(self, context_len: int) -> RowHistory:
        """Expects what the engine has seen of others."""
        return RowHistory(self._engine, context_len)

    @property
    def off_reason(self) -> str:
        """See `DraftGate`."""
        return "by what earlier steps took, drafting would have been slower than plain decoding"

    def decide(self, shape: StepShape, candidates: Sequence[Candidate]) -> DraftDecision:
        """See `DraftGate`. Rows that pay together, then rows that are due for a probe."""
        if not candidates or self._audit_left or self.account <= 0:
            return NOTHING
        plain_ns = self._plain_ns(shape)
        rows = [_Row(_history(each), each.max_drafts, _history(each).expectation) for each in candidates]
        shares = [1.0 if self._is_drafting and row.history.is_paying else _ENTRY for row in rows]
        best = self._best(shape, rows, [row.expected.accepted for row in rows], shares, plain_ns)
        if best.gain_ns <= self._options.margin * plain_ns:
            best = _Choice(0.0, 0, [])
        return self._with_probes(shape, candidates, rows, plain_ns, best)

    def _with_probes(
        self, shape: StepShape, candidates: Sequence[Candidate], rows: list[_Row], plain_ns: float, best: _Choice
    ) -> DraftDecision:
        decision = DraftDecision(best.rows, best.num_slots, best.gain_ns) if best.rows else NOTHING
        if self._num_steps < self._no_probe_before:
            return decision
        chosen = set(best.rows)
        due = [
            index
            for index, each in enumerate(candidates)
            if index not in chosen and each.context_len >= rows[index].history.next_probe_at
        ]
        if not due:
            return decision
        hopes = [row.history.hoped_accepted(each.context_len) for row, each in zip(rows, candidates, strict=True)]
        hoped = self._best(shape, rows, hopes, [1.0] * len(rows), plain_ns)
        if hoped.gain_ns <= 0:  # not even if they are better than they look
            self._no_probe_before = self._num_steps + _PROBE_PAUSE
            return decision
        num_slots = best.num_slots or hoped.num_slots
        hoped_rows = set(hoped.rows)
        probes = [index for index in due if index in hoped_rows][:_MAX_PROBES]
        while probes:
            drafted = best.rows + probes
            gain_ns = self._gain_ns(shape, [rows[index] for index in drafted], num_slots, plain_ns)
            if best.gain_ns - gain_ns <= min(self.account * plain_ns, _PROBE_HORIZON * hoped.gain_ns):
                return DraftDecision(drafted, num_slots, gain_ns, frozenset(probes))
            probes.pop()
        return decision

    def _best(
        self,
        shape: StepShape,
        rows: list[_Row],
        accepted_lens: list[list[float]],
        shares: list[float],
        plain_ns: float,
    ) -> _Choice:
        """The rows and slots of highest gain, each row counted with a share of its accepted length.

        For each block size the rows in order of what they bring, cut where the gain is highest among a few numbers of
        rows.
        """
        token_ns = plain_ns / shape.num_decoding
        best = _Choice(0.0, 0, [])
        for num_slots in self._sizes:
            slots = [num_slots if num_slots < row.max_drafts else row.max_drafts for row in rows]
            gains_ns = [token_ns * share * lens[n] for share, lens, n in zip(shares, accepted_lens, slots, strict=True)]
            verified = [row.expected.verified[n] for row, n in zip(rows, slots, strict=True)]
            all_verified = sum(verified)
            each_ns = self._verify_ns(shape, all_verified) / max(all_verified, 1e-9)
            worth_ns = [gain - each_ns * length for gain, length in zip(gains_ns, verified, strict=True)]
            order = sorted((index for index, ns in enumerate(worth_ns) if ns > 0), key=lambda index: -worth_ns[index])
            sums_ns = list(accumulate(gains_ns[index] for index in order))
            lens = list(accumulate(verified[index] for index in order))
            for count in _few_up_to(len(order)):
                added_ns = self._added_ns(shape, count, num_slots, lens[count - 1], plain_ns)
                if sums_ns[count - 1] - added_ns > best.gain_ns:
                    best = _Choice(sums_ns[count - 1] - added_ns, num_slots, order[:count])
        return best

    def _gain_ns(self, shape: StepShape, rows: list[_Row], num_slots: int, plain_ns: float) -> float:
        """Predicted gain of drafting the given rows."""
        accepted = sum(row.expected.accepted[min(num_slots, row.max_drafts)] for row in rows)
        verified = sum(row.expected.verified[min(num_slots, row.max_drafts)] for row in rows)
        added_ns = self._added_ns(shape, len(rows), num_slots, verified, plain_ns)
        return plain_ns / shape.num_decoding * accepted - added_ns

    def _plain_ns(self, shape: StepShape) -> float:
        """The decode rows alone, plainly: what a token costs does not depend on the prefill beside it."""
        rows = shape.num_decoding
        return self._costs.plain_ns(rows, rows, shape.decode_context) * self._correction.plain

    def _added_ns(
        self, shape: StepShape, num_drafted: int, num_slots: int, num_verified: float, plain_ns: float
    ) -> float:
        """What a step takes longer for drafting."""
        draft_ns = self._costs.draft_ns(num_drafted, num_slots) * self._correction.drafted
        unchained_ns = plain_ns * (self._correction.drafted / self._correction.plain - 1.0)
        return draft_ns + self._verify_ns(shape, num_verified) + unchained_ns

    def _verify_ns(self, shape: StepShape, num_verified: float) -> float:
        """What verifying so many drafts adds to the target's pass; between whole numbers in proportion."""
        context = shape.decode_context / shape.num_decoding
        whole = math.floor(num_verified)
        part = num_verified - whole

        def step_ns(num_drafts: int) -> float:
            read = shape.num_context + num_drafts * context
            return self._costs.plain_ns(shape.num_rows, shape.num_tokens + num_drafts, read)

        total_ns = (1.0 - part) * step_ns(whole) + (part * step_ns(whole + 1) if part else 0.0)
        return (total_ns - step_ns(0)) * self._correction.drafted

    def drafting(self, candidates: Sequence[Candidate], decision: DraftDecision) -> None:
        """See `DraftGate`."""
        drafted = set(decision.rows)
        for index, each in enumerate(candidates):
            history = _history(each)
            if index in drafted:
                history.was_drafted(each.context_len, is_probe=index in decision.probes)
            else:
                history.is_paying = False
        self._is_drafting = len(decision.probes) < len(decision.rows)
        if self._is_drafting:
            self._pause = 1
        elif decision.probes:
            self._pause = min(2 * self._pause, _MAX_PROBE_PAUSE)
            self._no_probe_before = self._num_steps + self._pause

    def observe_plain(self, shape: StepShape, elapsed_ns: int, *, is_steady: bool) -> None:
        """See `DraftGate`."""
        if not shape.num_decoding:
            return
        self._earn(0.0)
        if self._audit_left:
            self._audit_left -= 1
        else:
            self._is_drafting = False
        if is_steady and shape.num_tokens == shape.num_decoding:
            rows = shape.num_decoding
            predicted_ns = self._costs.plain_ns(rows, rows, shape.decode_context)
            self._correction.add_plain(elapsed_ns, predicted_ns, is_audit=self._is_drafting)

    def observe_drafted(
        self,
        shape: StepShape,
        decision: DraftDecision,
        rounds: Sequence[DraftedRound],
        elapsed_ns: int,
        *,
        is_steady: bool,
    ) -> float:
        """See `DraftGate`."""
        if not shape.num_decoding:
            return 0.0
        plain_ns = self._plain_ns(shape)
        verified = sum(each.num_verified for each in rounds)
        accepted = sum(each.num_accepted for each in rounds)
        draft_ns = self._costs.draft_ns(len(decision.rows), decision.num_slots)
        read = shape.num_context + verified * shape.decode_context / shape.num_decoding
        predicted_ns = self._costs.plain_ns(shape.num_rows, shape.num_tokens + verified, read) + draft_ns
        elapsed = min(float(elapsed_ns), OUTLIER * max(predicted_ns * self._correction.drafted, plain_ns))
        # Prefill in the step is paid for either way.
        prefill_ns = self._correction.drafted * (
            self._costs.plain_ns(shape.num_rows, shape.num_tokens, shape.num_context)
            - self._costs.plain_ns(shape.num_decoding, shape.num_decoding, shape.decode_context)
        )
        gain_ns = plain_ns / shape.num_decoding * accepted - (elapsed - prefill_ns - plain_ns)
        if is_steady:
            self._correction.add_drafted(elapsed, predicted_ns)
        self._earn(gain_ns / plain_ns)
        for each in rounds:
            _of(each.history).add(each.num_drafted, each.num_verified, each.num_accepted)
        self._until_audit -= 1
        if self._until_audit <= 0:
            self._audit_interval = min(2 * self._audit_interval, _MAX_AUDIT)
            self._until_audit, self._audit_left = self._audit_interval, _AUDIT_STEPS
        return gain_ns

    def _earn(self, plain_steps: float) -> None:
        """A step has ended that saved so many plain steps."""
        self._num_steps += 1
        self.account = min(self.account + self._options.probe_share + plain_steps, _MAX_CREDIT)


def _history(candidate: Candidate) -> RowHistory:
    return _of(candidate.history)


def _of(history: RowHistory | None) -> RowHistory:
    assert history is not None, "a row without a history came to the guard"
    return history


def _few_up_to(count: int) -> list[int]:
    """A few numbers from 1 to `count`, both ends included."""
    few, number = [], 1
    while number < count:
        few.append(number)
        number += max(1, number // 3)
    return [*few, count] if count else []
