"""Latency targets cap what drafts add to a step, priorities weigh rows, and goodput is counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from dspark.v1.scheduler_pb2 import SpeculationParams
from fakes.rig import running

from scheduler_service import startup
from scheduler_service.cost_model import CostModel
from scheduler_service.latency import TimedRows, draft_budget
from scheduler_service.policy import DraftedBatch, StepWork, VerifyPolicy
from service_kit.errors import InvalidRequestError

WORK = StepWork(num_rows=2, num_drafted=2, num_tokens=2, num_context=0.0, block_len=3)
COSTS = CostModel(100.0, 0.0, 1.0, np.arange(9) * 10.0, {3: np.array([0.0, 20.0, 40.0])})
"""T(K) of WORK with a context of 10: 100 + 20 + 40 + K · (10 + 10)."""


def budget_of(target_ns: list[float], survivals: list[list[float]], weights: list[float] | None = None) -> int | None:
    """For decode rows of which the first ones are drafted."""
    count = len(survivals)
    rows = TimedRows(np.array(target_ns), np.arange(count), np.array(survivals), np.array(weights or [1.0] * count))
    return draft_budget(COSTS, WORK, rows, 10)


@pytest.mark.parametrize(("target_ns", "budget"), [(159, 0), (160, 0), (180, 1), (219, 2), (280, None)])
def test_of_rows_that_nothing_is_known_of_drafts_are_expected_to_bring_nothing(
    target_ns: float, budget: int | None
) -> None:
    assert budget_of([target_ns, np.inf], [[0.0] * 3] * 2) == budget


def test_a_row_may_take_as_long_as_what_its_own_drafts_among_the_verified_bring() -> None:
    # T: 160 180 200 220 240 260 280. The first row's drafts come first: 1, 1.9, 2.7, 3.4 tokens.
    sure, unsure = [0.9, 0.8, 0.7], [0.5, 0.2, 0.1]
    assert budget_of([100.0, np.inf], [sure, unsure]) is None  # 280 <= 340
    assert budget_of([80.0, np.inf], [sure, unsure]) == 5  # 260 <= 272 < 280, though 160 is too long for one token
    assert budget_of([60.0, np.inf], [sure, unsure]) == 0  # 220 > 204: whatever is verified
    assert budget_of([70.0, np.inf], [sure, unsure]) == 3  # 220 <= 238 < 240
    # The second row: 1 token until its first draft is verified, as the fourth; then 1.5, 1.7, 1.8.
    assert budget_of([np.inf, 155.0], [sure, unsure]) == 5  # 160 > 155, but 260 <= 263; 280 > 279
    assert budget_of([np.inf, 157.0], [sure, unsure]) is None
    assert budget_of([np.inf, 145.0], [sure, unsure]) == 0


def test_priorities_say_whose_drafts_are_among_the_verified() -> None:
    rows = [[0.9, 0.8, 0.7], [0.5, 0.2, 0.1]]
    assert budget_of([np.inf, 121.0], rows) == 0  # 240 > 181 when its first draft comes
    assert budget_of([np.inf, 121.0], rows, [1.0, 10.0]) == 2  # at once: 180 <= 181, then 200 <= 205


def test_every_row_with_a_target_binds_drafted_or_not() -> None:
    rows = [[0.9, 0.8, 0.7]]
    assert budget_of([np.inf, 180.0], rows) == 1
    assert budget_of([80.0, 210.0], rows) == 2
    assert budget_of([np.inf, np.inf], rows) is None
    assert budget_of([np.inf, 100.0], rows) == 0


@pytest.mark.parametrize("seed", range(30))
def test_the_budget_is_that_of_trying_every_number(seed: int) -> None:
    dice = np.random.default_rng(seed)
    count, slots, extra = int(dice.integers(1, 5)), int(dice.integers(1, 4)), int(dice.integers(0, 3))
    survivals = np.cumprod(dice.random((count, slots)) * dice.integers(0, 2, (count, 1)), axis=1)
    weights, target_ns = dice.choice([1.0, 2.0], count), np.where(dice.random(count + extra) < 0.6, 0.0, np.inf)
    target_ns[target_ns == 0] = dice.uniform(60, 400, int((target_ns == 0).sum()))
    drafted = np.sort(dice.permutation(count + extra)[:count])
    rows = TimedRows(target_ns, drafted, survivals, weights)
    step_ns = COSTS.total_ns(WORK, np.full(count * slots, 10.0))
    order = np.argsort(-(survivals * weights[:, None]).ravel(), kind="stable")

    def is_kept(budget: int) -> bool:
        tokens = np.ones(count + extra)
        for draft in order[:budget]:
            tokens[drafted[draft // slots]] += survivals.ravel()[draft]
        return bool((step_ns[budget] <= target_ns * tokens + 1e-9).all())

    most = max((budget for budget in range(count * slots + 1) if is_kept(budget)), default=0)
    assert draft_budget(COSTS, WORK, rows, 10) == (None if most == count * slots else most)


class Watch(VerifyPolicy):
    """Keeps what it was shown; verifies everything."""

    def __init__(self) -> None:
        self.shown: list[tuple[list[float], int | None]] = []

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        self.shown.append((list(batch.row_weights), batch.max_budget))
        return usable


@pytest.mark.parametrize(("target_ms", "is_drafted"), [(None, True), (1e9, True), (1e-9, False)])
def test_a_request_is_not_drafted_beyond_its_target_and_goodput_is_counted(
    target_ms: float | None, is_drafted: bool
) -> None:
    with running("static", prefix_cache="off") as rig:
        rig.scheduler._batch.costs = CostModel(1e6, 0.0, 0.0, np.arange(60) * 1e5, {3: np.arange(9) * 1e5})
        summary = rig.submit([1, 2, 3], 12, max_time_per_token_ms=target_ms).wait()
        assert (summary.choices[0].num_drafted > 0) is is_drafted
        ledger = rig.scheduler.load().ledger
        counts = ledger.num_targeted_choices, ledger.num_on_target_choices, ledger.num_on_target_tokens
        assert counts == {None: (0, 0, 0), 1e9: (1, 1, 12), 1e-9: (1, 0, 0)}[target_ms]
        assert ledger.num_targeted_tokens == (12 if target_ms else 0)


def test_targets_and_priorities_reach_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr(startup, "create_policy", lambda *_: watch)
    with running("static", prefix_cache="off", max_time_per_token_ms=1.55) as rig:  # 1 ms, then 0.1 ms a token row
        rig.scheduler._batch.costs = CostModel(1e6, 0.0, 0.0, np.arange(60) * 1e5, {3: np.zeros(9)})
        for stream in rig.submit_all([[1, 2], [3, 4]], 12, priority=2.5):
            stream.wait()
        rig.submit([5, 6], 12, max_time_per_token_ms=1e9).wait()
    assert ([2.5, 2.5], 3) in watch.shown, "two rows and three drafts are five token rows: 1.5 ms"
    assert ([1.0], None) in watch.shown, "its own target is wide"


@pytest.mark.parametrize("target_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_targets_are_refused(target_ms: float) -> None:
    with running("off") as rig, pytest.raises(InvalidRequestError, match="max_time_per_token_ms is") as caught:
        rig.submit([1], max_time_per_token_ms=target_ms)
    assert caught.value.field == "speculation.max_time_per_token_ms"


def test_a_target_that_the_mode_cannot_keep_is_refused() -> None:
    with (
        running("static") as rig,
        pytest.raises(InvalidRequestError, match="verify_mode static verifies by a fixed rule"),
    ):
        rig.submit([1], max_time_per_token_ms=5.0)
    with running("off") as rig:  # nothing is drafted, so drafts push nobody beyond it
        rig.submit([1], 3, max_time_per_token_ms=5.0).wait()


@pytest.mark.parametrize("priority", [1 / 64, 64.0])
def test_bounds_of_priorities_survive_the_wire(priority: float) -> None:
    sent = SpeculationParams.FromString(SpeculationParams(priority=priority).SerializeToString())
    with running() as rig:
        rig.submit([1], 3, priority=sent.priority).wait()


@pytest.mark.parametrize("priority", [0.0, -1.0, 65.0, float("nan")])
def test_impossible_priorities_are_refused(priority: float) -> None:
    with running() as rig, pytest.raises(InvalidRequestError, match=r"priority is .*\[1/64, 64\]"):
        rig.submit([1], priority=priority)
