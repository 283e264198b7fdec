"""Never slower than not speculating: what is drafted is what history says will pay, and trying is on a budget.

What drafts are worth comes from earlier rounds (`draft_history`), what a step gains by them from `draft_choice`. Times
come from the cost model, corrected by what steps really took (`step_times`): plain steps are chained and cost less than
calls made one by one, drafted steps wait for the scheduler twice. What drafted steps brought, against what was expected
of them, corrects the lengths.

*The account* bounds the loss. It is kept in plain steps: every step adds `probe_share` of the rows that may be drafted
(who asks for no drafts pays for none), every drafted step the gain that was measured, and so does a plain step that
drafting disturbed: behind a drafted one it could not be chained. While the account is empty nothing is drafted; a probe
(a row drafted to learn whether that would pay) needs its predicted loss on it. So all time lost to drafting is at most
the first credit + `probe_share` of the steps, but for two steps (the second is planned before the first is learned
from), however wrong the predictions are: as far as plain steps are measured right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_service.draft_choice import NO_CHOICE, DraftChoice, StepValue, plain_ns
from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, DraftGate, GateCosts, StepShape
from scheduler_service.draft_history import Bools, DraftedRounds, DraftHistory, Floats
from scheduler_service.step_times import OUTLIER, StepTimes

_FIRST_CREDIT = 4.0
"""Plain steps' worth of time that may be lost before anything has paid."""
_MAX_CREDIT = 64.0
_ENTRY = 0.9
"""Share of its expected accepted length that a row not drafted in the last step is judged by: it must pay clearly to
start, and only just to go on."""
_MAX_PROBES = 2
"""Rows probed in a step; more where the draft pass takes them for little more."""
_AUDIT_STEPS, _FIRST_STEPS = 4, 8
"""Plain steps measured together while drafting, and before anything was drafted to begin with: the first is not chained
behind another, and tells little."""
_AUDIT_SHARE = 0.01
"""Share of the time that plain steps measured while drafting may cost by not being drafted."""
_AUDIT_INTERVALS = (16, 256)
"""Drafted steps between them: a small gain is measured often, since little would turn it over, and any gain while plain
steps were measured a few times only (the first interval is the least, and none more than twice the one before). At once
after the least number if drafted steps became so much slower or faster that plain ones are guessed to have as well:"""
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

    probe_share: float = 0.005
    """Share of the time that may be lost to learning whether drafting would pay."""
    margin: float = 0.02
    """Least predicted gain, in plain steps, for which a step drafts."""


class Guard(DraftGate):
    """The gate of scheduled modes."""

    def __init__(self, costs: GateCosts, block_sizes: Sequence[int], options: GuardOptions | None = None) -> None:
        """`block_sizes`: numbers of slots that may be drafted, the drafter's whole block among them."""
        self._costs, self._sizes, self._options = costs, sorted(block_sizes), options or GuardOptions()
        self._history = DraftHistory(self._sizes[-1])
        self._correction = StepTimes()
        self._realised = _Realised()
        self.account = _FIRST_CREDIT
        """Time that may still be lost, in plain steps."""
        self._able_share = 1.0
        """Rows that may be drafted, of those that decode: as last looked at."""
        self._is_drafting = False
        self._num_steps = self._no_probe_before = 0
        self._pause = 1
        self._look_again_at = self._looked_at = 0
        self._ahead: DraftDecision | None = None
        """Of the next step, slots in place of rows."""
        self._since_audit = 0
        """Drafted steps of no clear gain since plain ones were measured."""
        self._audit_left = _FIRST_STEPS
        """Plain steps to come that are measured."""
        self._longest_interval = float(_AUDIT_INTERVALS[0])

    def begin(self, slot: int, context_len: int) -> None:
        """See `DraftGate`."""
        self._history.begin(slot, context_len)

    @property
    def off_reason(self) -> str:
        """See `DraftGate`."""
        return "by what earlier steps took, drafting would have been slower than plain decoding"

    def look_ahead(self, shape: StepShape, candidates: Candidates) -> None:
        """See `DraftGate`."""
        decision, slots = self._decide(shape, candidates), candidates.slots.tolist()
        probes = frozenset(slots[row] for row in decision.probes)
        self._ahead = decision._replace(rows=[slots[row] for row in decision.rows], probes=probes)

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        """See `DraftGate`. Rows that pay together, then rows that are due for a probe."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self._decide(shape, candidates)
        row_of = {slot: row for row, slot in enumerate(candidates.slots.tolist())}
        rows = [row_of[slot] for slot in ahead.rows if slot in row_of]
        probes = frozenset(row_of[slot] for slot in ahead.probes if slot in row_of)
        return ahead._replace(rows=rows, probes=probes) if rows else NOTHING

    def _decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        self._able_share = candidates.num_rows / max(1, shape.num_decoding)
        if not candidates.num_rows or self._audit_left or self.account <= 0:
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

    def survivals(self, candidates: Candidates) -> Floats:
        """See `DraftGate`."""
        expected = self._history.survivals(candidates.slots) * self._realised.share
        survivals: Floats = np.minimum(expected, 1.0) * self._is_within(candidates)
        return survivals

    def _is_within(self, candidates: Candidates) -> Bools:
        """[candidates, block] whether each draft may be verified."""
        within: Bools = np.arange(self._sizes[-1]) < candidates.max_drafts[:, None]
        return within

    def _look(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        slots = candidates.slots
        value = StepValue(self._costs, self._correction, shape, candidates.num_rows, self._sizes[-1])
        survivals = self.survivals(candidates)
        is_going_on = self._history.is_paying(slots) if self._is_drafting else np.zeros(slots.size, np.bool_)
        shares = np.where(is_going_on, 1.0, _ENTRY)
        best = value.best(survivals * shares[:, None], self._sizes)
        if best.gain_ns <= self._options.margin * value.plain_ns:
            best = NO_CHOICE
        if self._num_steps < self._no_probe_before:
            return _decision(best)
        is_due = self._history.is_due(slots, candidates.context_lens)
        is_due[best.rows] = False
        if not is_due.any():
            return _decision(best)
        hopes = self._history.hoped_survivals(slots, candidates.context_lens) * self._is_within(candidates)
        hoped = value.best(hopes, self._sizes)
        if hoped.gain_ns <= 0:  # not even if they are better than they look
            self._no_probe_before = self._num_steps + _LOOK_PAUSE
            return _decision(best)
        is_due[np.setdiff1d(np.arange(slots.size), hoped.rows)] = False
        return self._with_probes(value, survivals, best, hoped, np.flatnonzero(is_due).tolist())

    def _with_probes(
        self, value: StepValue, survivals: Floats, best: DraftChoice, hoped: DraftChoice, due: list[int]
    ) -> DraftDecision:
        """`best`, and of the rows in `due` as many as the account pays for."""
        num_slots = best.num_slots or hoped.num_slots
        allowed_ns = min(self.account * value.plain_ns, _PROBE_HORIZON * hoped.gain_ns)
        probes = due[: self._most_probes(len(best.rows), num_slots)]
        while probes:
            choice = value.of_rows(survivals, best.rows + probes, num_slots)
            if best.gain_ns - choice.gain_ns <= allowed_ns:
                return _decision(choice, frozenset(probes))
            del probes[len(probes) // 2 :]
        return _decision(best)

    def _most_probes(self, num_drafted: int, num_slots: int) -> int:
        """Rows probed together: as many as a draft pass takes at little more than the cost of `_MAX_PROBES`."""
        most = _MAX_PROBES
        affordable_ns = _FEW_MORE * self._costs.draft_ns(num_drafted + most, num_slots)
        while most < 512 and self._costs.draft_ns(num_drafted + 2 * most, num_slots) <= affordable_ns:
            most *= 2
        return most

    def drafting(self, candidates: Candidates, decision: DraftDecision) -> None:
        """See `DraftGate`."""
        rows = np.array(decision.rows, np.intp)
        self._history.were_left_out(np.delete(candidates.slots, rows))
        is_probe = np.isin(rows, list(decision.probes))
        self._history.were_drafted(candidates.slots[rows], candidates.context_lens[rows], is_probe)
        self._is_drafting = len(decision.probes) < len(decision.rows)
        if self._is_drafting:
            self._pause = 1
        elif decision.probes:
            self._pause = min(2 * self._pause, _PAUSE_BY_ROWS * candidates.num_rows, _MAX_PROBE_PAUSE)
            self._no_probe_before = self._num_steps + self._pause

    def observe_plain(self, shape: StepShape, elapsed_ns: int, *, is_steady: bool, is_disturbed: bool) -> float:
        """See `DraftGate`."""
        if not shape.num_decoding:
            return 0.0
        gain_ns = 0.0
        self._realised.fade()
        if self._audit_left:
            self._audit_left -= 1
        else:
            self._is_drafting = False
        if shape.num_tokens == shape.num_decoding:
            predicted_ns = plain_ns(self._costs, shape)
            plain_step_ns = predicted_ns * self._correction.plain
            if is_steady:
                self._correction.add_plain(elapsed_ns, predicted_ns, is_audit=self._is_drafting)
            if is_disturbed:
                gain_ns = plain_step_ns - min(float(elapsed_ns), OUTLIER * plain_step_ns)
            self._earn(gain_ns / plain_step_ns)
        else:
            self._earn(0.0)
        return gain_ns

    def observe_drafted(
        self,
        shape: StepShape,
        decision: DraftDecision,
        rounds: DraftedRounds,
        elapsed_ns: int,
        *,
        is_steady: bool,
    ) -> float:
        """See `DraftGate`."""
        if not shape.num_decoding:
            return 0.0
        decode_ns = plain_ns(self._costs, shape)
        plain_step_ns = decode_ns * self._correction.plain
        verified, accepted = int(rounds.num_verified.sum()), int(rounds.num_accepted.sum())
        draft_ns = self._costs.draft_ns(len(decision.rows), decision.num_slots)
        read = shape.num_context + verified * shape.decode_context / shape.num_decoding
        predicted_ns = self._costs.plain_ns(shape.num_rows, shape.num_tokens + verified, read) + draft_ns
        elapsed = min(float(elapsed_ns), OUTLIER * max(predicted_ns * self._correction.drafted, plain_step_ns))
        # Prefill in the step is paid for either way.
        whole_ns = self._costs.plain_ns(shape.num_rows, shape.num_tokens, shape.num_context)
        prefill_ns = self._correction.drafted * (whole_ns - decode_ns)
        gain_ns = plain_step_ns / shape.num_decoding * accepted - (elapsed - prefill_ns - plain_step_ns)
        if is_steady:
            self._correction.add_drafted(elapsed, predicted_ns)
        self._earn(gain_ns / plain_step_ns)
        if len(decision.probes) < len(decision.rows):
            self._realised.add(accepted, decision.num_accepted)
        self._history.add(rounds)
        self._plan_audit(decision.gain_ns / plain_step_ns, gain_ns / plain_step_ns)
        return gain_ns

    def _plan_audit(self, predicted: float, measured: float) -> None:
        """After a drafted step, of gains in plain steps: whether it is time to measure plain ones."""
        self._since_audit += measured < _CLEAR_GAIN
        least, most = _AUDIT_INTERVALS
        interval = min(most, self._longest_interval, max(least, _AUDIT_STEPS * predicted / _AUDIT_SHARE))
        if abs(self._correction.guessed) > _MAX_GUESS:
            interval = least
        if self._since_audit >= interval:
            self._since_audit, self._audit_left = 0, _AUDIT_STEPS
            self._longest_interval = 2 * interval

    def _earn(self, plain_steps: float) -> None:
        """A step has ended that saved so many plain steps."""
        self._num_steps += 1
        earned = self._able_share * self._options.probe_share
        self.account = min(self.account + earned + plain_steps, _MAX_CREDIT)


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


def _decision(choice: DraftChoice, probes: frozenset[int] = frozenset()) -> DraftDecision:
    return DraftDecision(choice.rows, choice.num_slots, choice.gain_ns, probes, choice.num_accepted)
