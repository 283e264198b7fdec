"""Never slower than not speculating: what is drafted is what history says will pay, and trying is on a budget.

The gain of a drafted step is the time that plain decoding would have needed for the tokens it adds, less what the step
takes longer: λ · Σ accepted − (T_drafted − T_plain), with λ the time of a plain token at this batch size. What
drafts are worth comes from earlier rounds (`draft_history`), and of those as many are counted as a policy would verify
of them together: up to the highest throughput. Times come from the cost model, corrected by what steps really took
(`step_times`): plain steps are chained and cost less than calls made one by one, drafted steps wait for the scheduler
twice. What drafted steps brought, against what was expected of them, corrects the lengths.

*The account* bounds the loss. It is kept in plain steps: every step adds `probe_share`, every drafted step the gain
that was measured. While it is empty nothing is drafted; a probe (a row drafted to learn whether that would pay) needs
its predicted loss on it. So all time lost to drafting is at most the first credit + `probe_share` of the steps, but for
one step, however wrong the estimates are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.draft_gate import (
    NOTHING,
    Candidate,
    DraftDecision,
    DraftedRound,
    DraftGate,
    GateCosts,
    StepShape,
)
from scheduler_service.draft_history import EngineHistory, RowHistory
from scheduler_service.policy.base import StepWork
from scheduler_service.step_times import OUTLIER, StepTimes

Floats = npt.NDArray[np.float64]

_FIRST_CREDIT = 4.0
"""Plain steps' worth of time that may be lost before anything has paid."""
_MAX_CREDIT = 64.0
_ENTRY = 0.9
"""Share of its expected accepted length that a row not drafted in the last step is judged by: it must pay clearly to
start, and only just to go on."""
_MAX_PROBES = 2
"""Rows probed in a step; more where the draft pass takes them for little more."""
_AUDIT_STEPS = 4
"""Plain steps measured together while drafting: the first is not chained behind another, and tells little."""
_AUDIT_SHARE = 0.01
"""Share of the time that plain steps measured while drafting may cost by not being drafted."""
_AUDIT_INTERVALS = (16, 256)
"""Drafted steps between them: a small gain is measured often, since little would turn it over. At once after the first
number of them if drafted steps became so much slower or faster that plain ones are guessed to have as well:"""
_MAX_GUESS = 0.05
_CLEAR_GAIN = 0.5
"""Plain steps saved by a drafted one from which on it calls for no audit: nothing that drifts would turn it over."""
_FEW_MORE = 1.1
"""Times what a draft pass over `_MAX_PROBES` rows costs, which probing more rows may cost."""
_REALISED_MEMORY, _REALISED_FADE = 0.97, 0.998
"""Weight that realised and expected lengths keep from one drafted step to the next, and over a plain one."""
_REALISED_PRIOR = 20.0
"""Drafts that came as expected, to begin with."""
_MAX_REALISED = 1.5
"""A policy sees which drafts are good: it gets more out of as many than their mean."""
_PROBE_HORIZON = 8
"""Steps within which a probe's loss must come back if the rows are as good as they are hoped to be."""
_LOOK_PAUSE = 4
"""Steps until rows are looked at again when none was worth a draft, or none more a probe."""
_MAX_PROBE_PAUSE, _PAUSE_BY_ROWS = 64, 4
"""Steps between probes that led to nothing: the pause doubles with each, up to a number of steps for each row that
could be drafted, since what a probe finds out concerns a smaller part of a larger batch."""


@dataclass(frozen=True)
class GuardOptions:
    """What the guard can be told."""

    probe_share: float = 0.01
    """Share of the time that may be lost to learning whether drafting would pay."""
    margin: float = 0.02
    """Least predicted gain, in plain steps, for which a step drafts."""


class _Choice(NamedTuple):
    gain_ns: float
    num_slots: int
    rows: list[int]
    num_accepted: float = 0.0
    """Drafts expected to be committed."""


_NO_CHOICE = _Choice(0.0, 0, [])


class Guard(DraftGate):
    """The gate of scheduled modes."""

    def __init__(self, costs: GateCosts, block_sizes: Sequence[int], options: GuardOptions | None = None) -> None:
        """`block_sizes`: numbers of slots that may be drafted, the drafter's whole block among them."""
        self._costs, self._sizes, self._options = costs, sorted(block_sizes), options or GuardOptions()
        self._engine = EngineHistory(self._sizes[-1])
        self._correction = StepTimes()
        self._realised = _Realised()
        self.account = _FIRST_CREDIT
        """Time that may still be lost, in plain steps."""
        self._is_drafting = False
        self._num_steps = self._no_probe_before = 0
        self._pause = 1
        self._look_again_at = self._looked_at = 0
        self._since_audit = 0
        """Drafted steps of no clear gain since plain ones were measured."""
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
        if self._is_settled(shape):
            return NOTHING
        decision = self._look(shape, candidates)
        self._look_again_at = self._num_steps + (0 if decision.rows else _LOOK_PAUSE)
        self._looked_at = shape.num_decoding
        return decision

    def _is_settled(self, shape: StepShape) -> bool:
        """Whether a look at as many rows found nothing worth drafting just before: looking takes time, too."""
        return self._num_steps < self._look_again_at and shape.num_decoding == self._looked_at

    def _look(self, shape: StepShape, candidates: Sequence[Candidate]) -> DraftDecision:
        plain_ns = self._plain_ns(shape)
        histories = [_history(each) for each in candidates]
        limits = np.array([each.max_drafts for each in candidates])
        shares = [1.0 if self._is_drafting and each.is_paying else _ENTRY for each in histories]
        survivals = np.array([each.expectation.survivals for each in histories])
        survivals *= np.arange(self._sizes[-1]) < limits[:, None]
        survivals = np.minimum(survivals * self._realised.share, 1.0)
        best = self._best(shape, survivals * np.array(shares)[:, None], plain_ns)
        if best.gain_ns <= self._options.margin * plain_ns:
            best = _NO_CHOICE
        return self._with_probes(shape, candidates, survivals, limits, plain_ns, best)

    def _with_probes(
        self,
        shape: StepShape,
        candidates: Sequence[Candidate],
        survivals: Floats,
        limits: npt.NDArray[np.intp],
        plain_ns: float,
        best: _Choice,
    ) -> DraftDecision:
        decision = NOTHING
        if best.rows:
            decision = DraftDecision(best.rows, best.num_slots, best.gain_ns, num_accepted=best.num_accepted)
        if self._num_steps < self._no_probe_before:
            return decision
        chosen = set(best.rows)
        due = [
            index
            for index, each in enumerate(candidates)
            if index not in chosen and each.context_len >= _history(each).next_probe_at
        ]
        if not due:
            return decision
        hopes = np.array([_history(each).hoped_survivals(each.context_len) for each in candidates])
        hopes *= np.arange(self._sizes[-1]) < limits[:, None]
        hoped = self._best(shape, hopes, plain_ns)
        if hoped.gain_ns <= 0:  # not even if they are better than they look
            self._no_probe_before = self._num_steps + _LOOK_PAUSE
            return decision
        num_slots = best.num_slots or hoped.num_slots
        hoped_rows = set(hoped.rows)
        probes = [index for index in due if index in hoped_rows][: self._most_probes(len(best.rows), num_slots)]
        while probes:
            drafted = best.rows + probes
            choice = self._of_rows(shape, survivals, drafted, num_slots, plain_ns)
            if best.gain_ns - choice.gain_ns <= min(self.account * plain_ns, _PROBE_HORIZON * hoped.gain_ns):
                return DraftDecision(drafted, num_slots, choice.gain_ns, frozenset(probes), choice.num_accepted)
            del probes[len(probes) // 2 :]
        return decision

    def _most_probes(self, num_drafted: int, num_slots: int) -> int:
        """Rows probed together: as many as a draft pass takes at little more than the cost of `_MAX_PROBES`."""
        most = _MAX_PROBES
        affordable_ns = _FEW_MORE * self._costs.draft_ns(num_drafted + most, num_slots)
        while most < 512 and self._costs.draft_ns(num_drafted + 2 * most, num_slots) <= affordable_ns:
            most *= 2
        return most

    def _best(self, shape: StepShape, survivals: Floats, plain_ns: float) -> _Choice:
        """The rows and slots of highest expected throughput. `survivals`: [candidates, block] of each draft.

        For each block size the rows in order of what they bring, cut at a few numbers of rows; of their drafts the
        likeliest are verified, as many as throughput gains by.
        """
        num_rows = survivals.shape[0]
        verify_ns = self._verify_ns(shape, num_rows * self._sizes[-1])
        best, best_rate = _NO_CHOICE, shape.num_decoding / plain_ns
        counts = np.array(_few_up_to(num_rows))
        for num_slots in self._sizes:
            own = survivals[:, :num_slots]
            by_worth = np.argsort(-own.sum(axis=1), kind="stable")
            rate, count, accepted, added_ns = self._cut(shape, own[by_worth], counts, verify_ns, plain_ns)
            if rate > best_rate:
                gain_ns = plain_ns / shape.num_decoding * accepted - added_ns
                best, best_rate = _Choice(gain_ns, num_slots, by_worth[:count].tolist(), accepted), rate
        return best

    def _cut(
        self, shape: StepShape, survivals: Floats, counts: npt.NDArray[np.intp], verify_ns: Floats, plain_ns: float
    ) -> tuple[float, int, float, float]:
        """Throughput, number of rows, drafts accepted and time added where the first `counts` rows are drafted: those
        of the best of them. `survivals`: [rows, slots]."""
        num_slots = survivals.shape[1]
        flat = survivals.ravel()
        order = np.argsort(-flat, kind="stable")
        is_inside = (order // num_slots) < counts[:, None]
        accepted = np.cumsum(np.where(is_inside, flat[order], 0.0), axis=1)
        fixed_ns = np.array([self._draft_ns(count, num_slots, plain_ns) for count in counts.tolist()])
        added_ns = verify_ns[np.cumsum(is_inside, axis=1)] + fixed_ns[:, None]
        rates = (shape.num_decoding + accepted) / (plain_ns + added_ns)
        best = int(np.argmax(rates))
        return (
            float(rates.ravel()[best]),
            int(counts[best // rates.shape[1]]),
            float(accepted.ravel()[best]),
            float(added_ns.ravel()[best]),
        )

    def _of_rows(
        self, shape: StepShape, survivals: Floats, rows: list[int], num_slots: int, plain_ns: float
    ) -> _Choice:
        """What drafting just these rows would bring."""
        verify_ns = self._verify_ns(shape, len(rows) * num_slots)
        drafted = survivals[rows, :num_slots]
        _, _, accepted, added_ns = self._cut(shape, drafted, np.array([len(rows)]), verify_ns, plain_ns)
        # Where nothing would be verified, drafting is paid for all the same.
        nothing_ns = self._draft_ns(len(rows), num_slots, plain_ns)
        gain_ns = max(plain_ns / shape.num_decoding * accepted - added_ns, -nothing_ns)
        return _Choice(gain_ns, num_slots, rows, accepted)

    def _plain_ns(self, shape: StepShape) -> float:
        """The decode rows alone, plainly: what a token costs does not depend on the prefill beside it."""
        rows = shape.num_decoding
        return self._costs.plain_ns(rows, rows, shape.decode_context) * self._correction.plain

    def _draft_ns(self, num_drafted: int, num_slots: int, plain_ns: float) -> float:
        """What a step takes longer for drafting, whatever is verified."""
        draft_ns = self._costs.draft_ns(num_drafted, num_slots) * self._correction.drafted
        return draft_ns + plain_ns * (self._correction.drafted / self._correction.plain - 1.0)

    def _verify_ns(self, shape: StepShape, num_drafts: int) -> Floats:
        """[drafts + 1] what verifying so many drafts adds to the target's pass."""
        contexts = np.full(num_drafts, shape.decode_context / shape.num_decoding)
        work = StepWork(shape.num_rows, 0, shape.num_tokens, shape.num_context)
        step_ns = self._costs.step_ns(work, contexts)
        added_ns: Floats = (step_ns - step_ns[0]) * self._correction.drafted
        return added_ns

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
            self._pause = min(2 * self._pause, _PAUSE_BY_ROWS * len(candidates), _MAX_PROBE_PAUSE)
            self._no_probe_before = self._num_steps + self._pause

    def observe_plain(self, shape: StepShape, elapsed_ns: int, *, is_steady: bool) -> None:
        """See `DraftGate`."""
        if not shape.num_decoding:
            return
        self._earn(0.0)
        self._realised.fade()
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
        if len(decision.probes) < len(decision.rows):
            self._realised.add(accepted, decision.num_accepted)
        for each in rounds:
            _of(each.history).add(each.num_drafted, each.num_verified, each.num_accepted, each.confidences)
        self._plan_audit(decision.gain_ns / plain_ns, gain_ns / plain_ns)
        return gain_ns

    def _plan_audit(self, predicted: float, measured: float) -> None:
        """After a drafted step, of gains in plain steps: whether it is time to measure plain ones."""
        self._since_audit += measured < _CLEAR_GAIN
        least, most = _AUDIT_INTERVALS
        interval = min(most, max(least, _AUDIT_STEPS * predicted / _AUDIT_SHARE))
        if abs(self._correction.guessed) > _MAX_GUESS:
            interval = least
        if self._since_audit >= interval:
            self._since_audit, self._audit_left = 0, _AUDIT_STEPS

    def _earn(self, plain_steps: float) -> None:
        """A step has ended that saved so many plain steps."""
        self._num_steps += 1
        self.account = min(self.account + self._options.probe_share + plain_steps, _MAX_CREDIT)


class _Realised:
    """Drafts committed against those expected: what a policy cannot use, or uses better, than history says."""

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0

    def add(self, num_accepted: int, num_expected: float) -> None:
        """A drafted step."""
        self._accepted = _REALISED_MEMORY * self._accepted + num_accepted
        self._expected = _REALISED_MEMORY * self._expected + num_expected

    def fade(self) -> None:
        """A plain step: in the end it is worth another try."""
        self._accepted *= _REALISED_FADE
        self._expected *= _REALISED_FADE

    @property
    def share(self) -> float:
        """Factor of what is expected."""
        return min(_MAX_REALISED, (self._accepted + _REALISED_PRIOR) / (self._expected + _REALISED_PRIOR))


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
        number += max(1, number // 2)
    return [*few, count] if count else []
