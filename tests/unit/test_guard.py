"""The guard in a simulated engine of known costs and acceptance: never slower than plainly, fast where that pays."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from scheduler_service.draft_gate import Candidates, GateCosts, StepShape
from scheduler_service.draft_history import DraftedRounds
from scheduler_service.guard import Guard, GuardOptions
from scheduler_service.policy import StepWork

BLOCK = 7


@dataclass
class Costs(GateCosts):
    """Milliseconds in nanoseconds: a flat start, then a slope."""

    bias: float = 8.0
    token: float = 0.5
    draft_bias: float = 1.0
    draft_slot: float = 0.1

    def plain_ns(self, num_rows: int, num_tokens: int, num_context: float) -> float:
        return 1e6 * (self.bias + self.token * num_tokens)

    def step_ns(self, work: StepWork, contexts: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return 1e6 * (self.bias + self.token * (work.num_tokens + np.arange(contexts.size + 1)))

    def draft_ns(self, num_drafted: int, block_len: int) -> float:
        return 1e6 * (self.draft_bias + self.draft_slot * num_drafted * block_len) if num_drafted else 0.0


@dataclass
class Row:
    acceptance: float
    context_len: int = 10
    num_drafted: int = 0
    num_tokens: int = 0


@dataclass
class Engine:
    """Runs steps as the costs say; `real` costs may differ from those that the guard is told."""

    guard: Guard
    real: Costs
    acceptances: list[float]
    noise: float = 0.05
    window: int = BLOCK
    dice: random.Random = field(default_factory=lambda: random.Random(3))
    disturbance: float = 0.0
    """What a plain step behind a drafted one takes longer, in plain steps."""
    has_drafted: bool = False
    gain_ns: float = 0.0
    """As the guard sees it."""
    time_ns: float = 0.0
    plain_time_ns: float = 0.0
    """What the same tokens would have taken plainly."""
    num_slots: list[int] = field(default_factory=list)
    num_drafted_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [self._begin(slot, each) for slot, each in enumerate(self.acceptances)]

    def _begin(self, slot: int, acceptance: float) -> Row:
        self.guard.begin(slot, 10)
        return Row(acceptance)

    def run(self, num_steps: int, life: int = 10**9) -> None:
        for _ in range(num_steps):
            self._step()
            self.rows = [
                row if row.num_tokens < life else self._begin(slot, row.acceptance)
                for slot, row in enumerate(self.rows)
            ]

    def _step(self) -> None:
        count = len(self.rows)
        context = float(sum(row.context_len for row in self.rows))
        shape = StepShape(count, count, context, count, context)
        candidates = _candidates([row.context_len for row in self.rows])
        decision = self.guard.decide(shape, candidates)
        plain_ns = self.real.plain_ns(count, count, 0)
        accepted = [0] * count
        self.num_slots.append(decision.num_slots)
        self.num_drafted_rows.append(len(decision.rows))
        if not decision.rows:
            disturbed_ns = self.disturbance * plain_ns if self.has_drafted else 0.0
            elapsed = (plain_ns + disturbed_ns) * self._luck()
            self.gain_ns += self.guard.observe_plain(
                shape, round(elapsed), is_steady=not self.has_drafted, is_disturbed=self.has_drafted
            )
        else:
            self.guard.drafting(candidates, decision)
            verified = min(decision.num_slots, self.window)
            for index in decision.rows:
                row = self.rows[index]
                while accepted[index] < verified and self.dice.random() < row.acceptance:
                    accepted[index] += 1
                row.num_drafted += 1
            rounds = _rounds(decision.rows, decision.num_slots, verified, [accepted[row] for row in decision.rows])
            elapsed = self.real.plain_ns(count, count + verified * len(decision.rows), 0)
            elapsed += self.real.draft_ns(len(decision.rows), decision.num_slots)
            elapsed *= self._luck()
            self.gain_ns += self.guard.observe_drafted(shape, decision, rounds, round(elapsed), is_steady=True)
        self.has_drafted = bool(decision.rows)
        self.time_ns += elapsed
        for row, more in zip(self.rows, accepted, strict=True):
            row.context_len += 1 + more
            row.num_tokens += 1 + more
        self.plain_time_ns += plain_ns * (count + sum(accepted)) / count

    def _luck(self) -> float:
        return self.dice.lognormvariate(0.0, self.noise)

    @property
    def speedup(self) -> float:
        return self.plain_time_ns / self.time_ns


def _candidates(context_lens: list[int], max_drafts: int = BLOCK) -> Candidates:
    count = len(context_lens)
    return Candidates(np.arange(count), np.array(context_lens, np.intp), np.full(count, max_drafts))


def _rounds(slots: list[int], num_drafted: int, num_verified: int, num_accepted: list[int]) -> DraftedRounds:
    """Of rows without confidences."""
    ones = np.ones(len(slots), np.intp)
    unknown = np.empty((len(slots), 0), np.float32)
    return DraftedRounds(np.array(slots), num_drafted * ones, num_verified * ones, np.array(num_accepted), unknown)


def _engine(costs: Costs, acceptances: list[float], sizes: tuple[int, ...] = (3, 5, 7), **options: object) -> Engine:
    return Engine(Guard(costs, sizes), costs, acceptances, **options)  # type: ignore[arg-type]


def _observe_plain(guard: Guard) -> None:
    shape = StepShape(1, 1, 50.0, 1, 50.0)
    guard.observe_plain(shape, round(CHEAP.plain_ns(1, 1, 0)), is_steady=True, is_disturbed=False)


CHEAP = Costs(bias=8.0, token=0.5, draft_bias=1.0, draft_slot=0.1)
DEAR = Costs(bias=8.5, token=1.0, draft_bias=4.3, draft_slot=0.15)
_STEPS = 400
_ALLOWED = 0.005 + 4.0 / _STEPS + 0.012
"""Share of the time that may be lost: probes, the first credit, and the noise of steps that are not the guard's."""


def _best(costs: Costs, acceptance: float, count: int, sizes: tuple[int, ...] = (0, 3, 5, 7)) -> float:
    """Speed-up of the best number of slots, whole blocks verified, by the costs themselves."""
    plain_ns = costs.plain_ns(count, count, 0)

    def speedup(size: int) -> float:
        tokens = 1 + sum(acceptance**k for k in range(1, size + 1))
        step_ns = costs.plain_ns(count, count * (1 + size), 0) + costs.draft_ns(count if size else 0, size)
        return tokens * plain_ns / step_ns

    return max(speedup(size) for size in sizes)


@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.7, 0.85])
def test_never_slower_than_plain_decoding(costs: Costs, count: int, acceptance: float) -> None:
    for life in (128, 10**9):
        engine = _engine(costs, [acceptance] * count)
        engine.run(_STEPS, life)
        assert engine.speedup > 1.0 - _ALLOWED


@pytest.mark.parametrize(("costs", "count", "acceptance"), [(CHEAP, 1, 0.6), (CHEAP, 8, 0.85), (DEAR, 1, 0.7)])
def test_drafts_where_that_pays(costs: Costs, count: int, acceptance: float) -> None:
    engine = _engine(costs, [acceptance] * count)
    engine.run(_STEPS, life=128)
    best = _best(costs, acceptance, count)
    assert best > 1.3
    assert engine.speedup > 1.0 + 0.8 * (best - 1.0)


def test_a_prediction_that_is_wrong_costs_no_more_than_the_account_holds() -> None:
    told, real = Costs(draft_bias=0.1, draft_slot=0.0, token=0.0), Costs(draft_bias=12.0, draft_slot=0.5, token=1.0)
    engine = Engine(Guard(told, (7,)), real, [0.5] * 4)
    engine.run(_STEPS)
    assert sum(1 for slots in engine.num_slots if slots) > 1
    assert engine.speedup > 1.0 - _ALLOWED
    assert engine.guard.account > -3.0  # one step beyond what it held


def test_the_account_grows_by_the_probe_share_and_a_share_of_nothing_probes_on_the_first_credit_alone() -> None:
    engine = Engine(Guard(DEAR, (7,), GuardOptions(probe_share=0.0)), DEAR, [0.0])
    engine.run(2000, life=64)
    assert 0 < sum(slots > 0 for slots in engine.num_slots) < 20
    assert engine.guard.account <= 4.0
    assert engine.plain_time_ns / engine.time_ns > 1 - 7 / 2000 - 0.005
    silent = _engine(CHEAP, [0.0] * 32)
    silent.run(400)
    assert silent.guard.account == pytest.approx(4.0 + 400 * 0.005, abs=0.5)


def test_rows_that_pay_are_drafted_and_the_others_left_out() -> None:
    engine = _engine(Costs(bias=8.0, token=0.4, draft_bias=1.0, draft_slot=0.15), [0.9, 0.0, 0.9, 0.0])
    engine.run(600)
    good, bad, other, worse = (row.num_drafted for row in engine.rows)
    assert min(good, other) > 500
    assert max(bad, worse) < 60
    assert engine.speedup > 1.3


def test_blocks_are_short_where_acceptance_is_low_or_the_load_high() -> None:
    def mean_slots(costs: Costs, acceptances: list[float]) -> float:
        engine = _engine(costs, acceptances)
        engine.run(800)
        drafted = [slots for slots in engine.num_slots[100:] if slots]
        assert len(drafted) > 500
        return sum(drafted) / len(drafted)

    assert mean_slots(CHEAP, [0.9]) > 6.9
    assert mean_slots(CHEAP, [0.5]) < 4.5
    assert mean_slots(CHEAP, [0.85] * 8) < 5.5


def test_a_drafter_that_becomes_good_is_found_out_and_one_that_becomes_bad_dropped() -> None:
    engine = _engine(CHEAP, [0.05])
    engine.run(400)
    assert sum(slots > 0 for slots in engine.num_slots[100:400]) < 30
    engine.rows[0].acceptance = 0.9
    engine.run(1500)
    assert sum(slots > 0 for slots in engine.num_slots[-300:]) > 280
    engine.rows[0].acceptance = 0.0
    engine.run(500)
    assert sum(slots > 0 for slots in engine.num_slots[-300:]) < 30


def test_probes_become_rare() -> None:
    engine = _engine(CHEAP, [0.0])
    engine.run(4000)
    probed = [step for step, slots in enumerate(engine.num_slots) if slots]
    late = [after - before for before, after in itertools.pairwise(probed) if before > 1000]
    assert len(probed) < 80
    assert late
    assert min(late) > 100


def test_a_probe_beside_many_rows_drafts_few_of_them() -> None:
    engine = _engine(CHEAP, [0.6] * 32)
    engine.run(1000, life=100)
    probes = [count for count in engine.num_drafted_rows if count]
    assert not probes or max(probes) <= 2


def test_what_plain_steps_take_is_measured_again_while_drafting_goes_on() -> None:
    engine = _engine(CHEAP, [0.9])
    engine.run(2000)
    plain = [step for step, slots in enumerate(engine.num_slots) if not slots]
    assert plain[:4] == [0, 1, 2, 3]
    assert 4 < len(plain) <= 40
    # Plain steps become cheap all at once: nothing but an audit can tell.
    engine.real = Costs(bias=1.0, token=8.0, draft_bias=8.0)
    engine.run(2500)
    assert sum(slots > 0 for slots in engine.num_slots[-200:]) < 20


def test_drafts_that_gained_a_little_are_given_up_soon_when_they_cost_more() -> None:
    engine = _engine(CHEAP, [0.55] * 4)
    engine.run(4000, life=200)
    assert sum(slots > 0 for slots in engine.num_slots[-1000:]) > 700, "drafting paid"
    audits = sum(slots == 0 for slots in engine.num_slots[-1000:])
    assert audits > 30, "and little, so plain steps were measured often"
    # The machine drifts by nothing; draft passes become dear. That must not be taken for plain steps being slow.
    engine.real = Costs(bias=8.0, token=0.5, draft_bias=4.0, draft_slot=0.1)
    engine.run(300, life=200)
    assert sum(slots > 0 for slots in engine.num_slots[-100:]) < 40
    assert 0.97 < engine.guard._correction.plain < 1.05


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.42, 0.5, 0.9])
@pytest.mark.parametrize("disturbance", [0.0, 0.3])
def test_the_account_knows_what_the_steps_behind_drafted_ones_lose(acceptance: float, disturbance: float) -> None:
    engine = _engine(DEAR, [acceptance] * 2, disturbance=disturbance)
    engine.run(4000, life=60)
    assert engine.speedup > 0.98
    real_ns = engine.plain_time_ns - engine.time_ns
    # What plain steps take is measured seldom where drafting gains much.
    assert engine.gain_ns == pytest.approx(real_ns, abs=(0.01 if acceptance <= 0.5 else 0.03) * engine.plain_time_ns)


def test_prefill_beside_the_rows_is_nobodys_loss() -> None:
    guard = Guard(CHEAP, (3, 7))
    shape = StepShape(2, 101, 1000.0, 1, 50.0)
    guard.begin(0, 50)
    for _ in range(8):
        _observe_plain(guard)
    candidates = _candidates([50])
    decision = guard.decide(shape, candidates)
    assert decision.rows == [0]
    guard.drafting(candidates, decision)
    num_slots = decision.num_slots
    elapsed = CHEAP.plain_ns(2, 101 + num_slots, 0) + CHEAP.draft_ns(1, num_slots)
    gain_ns = guard.observe_drafted(
        shape, decision, _rounds([0], num_slots, num_slots, [num_slots]), round(elapsed), is_steady=True
    )
    added = elapsed - CHEAP.plain_ns(2, 101, 0)
    assert gain_ns == pytest.approx(num_slots * CHEAP.plain_ns(1, 1, 0) - added, rel=1e-3)


def test_a_row_with_little_room_counts_for_what_it_can_take() -> None:
    guard = Guard(CHEAP, (3, 7))
    for _ in range(8):
        _observe_plain(guard)
    guard.begin(0, 50)
    for _ in range(30):
        guard._history.add(_rounds([0], 7, 7, [7]))
    decisions = [guard.decide(StepShape(1, 1, 50.0, 1, 50.0), _candidates([50], max_drafts)) for max_drafts in (7, 2)]
    assert [decision.num_slots for decision in decisions] == [7, 3]
    assert decisions[0].gain_ns > decisions[1].gain_ns > 0


def test_what_was_looked_at_ahead_is_decided_for_the_rows_that_are_left() -> None:
    engine = _engine(CHEAP, [0.9, 0.1, 0.9, 0.5])
    engine.run(300)
    guard, shape = engine.guard, StepShape(4, 4, 400.0, 4, 400.0)
    candidates = _candidates([100] * 4)
    at_once = guard.decide(shape, candidates)
    assert {0, 2} <= set(at_once.rows)
    guard.look_ahead(shape, candidates)
    assert guard.decide(shape, candidates) == at_once
    guard.account = -1.0
    assert not guard.decide(shape, candidates).rows, "what was looked at ahead is used once"
    guard.account = 4.0
    guard.look_ahead(shape, candidates)
    left = guard.decide(shape, Candidates(np.array([3, 2]), np.array([100, 104]), np.array([7, 7])))
    assert left.rows == [{3: 0, 2: 1}[slot] for slot in at_once.rows if slot in (2, 3)]
    assert (left.num_slots, left.gain_ns) == (at_once.num_slots, at_once.gain_ns)
    guard.look_ahead(shape, candidates)
    assert not guard.decide(shape, Candidates(np.array([7]), np.array([100]), np.array([7]))).rows


def test_rows_that_may_not_be_drafted_earn_no_probes_for_the_others() -> None:
    guard, shape = Guard(CHEAP, (7,)), StepShape(4, 4, 200.0, 4, 200.0)
    for able, earned in ((0, 0.0), (1, 0.25), (4, 1.0)):
        before = guard.account
        guard.look_ahead(shape, _candidates([50] * able))
        guard.observe_plain(shape, round(CHEAP.plain_ns(4, 4, 0)), is_steady=True, is_disturbed=False)
        assert guard.account - before == pytest.approx(earned * 0.005)


def test_nothing_is_drafted_of_nothing() -> None:
    guard = Guard(CHEAP, (7,))
    assert not guard.decide(StepShape(0, 0, 0.0, 0, 0.0), _candidates([])).rows
    guard.observe_plain(StepShape(1, 64, 0.0, 0, 0.0), 1, is_steady=True, is_disturbed=False)  # prefill alone
    assert guard.account == 4.0
