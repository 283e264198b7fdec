"""Latency targets cap what drafts add to a step, priorities weigh rows, and goodput is counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from dspark.v1.scheduler_pb2 import SpeculationParams
from fakes.rig import running

from scheduler_service import startup
from scheduler_service.cost_model import CostModel
from scheduler_service.latency import TimedRow, draft_budget
from scheduler_service.policy import DraftedBatch, StepWork, VerifyPolicy
from service_kit.errors import InvalidRequestError

WORK = StepWork(num_rows=2, num_drafted=2, num_tokens=2, num_context=0.0, block_len=3)
COSTS = CostModel(100.0, 0.0, 1.0, np.arange(9) * 10.0, {3: np.array([0.0, 20.0, 40.0])})
"""T(K) of WORK with a context of 10: 100 + 20 + 40 + K · (10 + 10)."""


@pytest.mark.parametrize(
    ("target_ns", "expected_tokens", "budget"),
    [(159, 1.0, 0), (160, 1.0, 0), (180, 1.0, 1), (219, 1.0, 2), (110, 2.0, 3), (110, 2.5, 5), (280, 1.0, None)],
)
def test_the_budget_is_the_most_that_keeps_the_target(
    target_ns: float, expected_tokens: float, budget: int | None
) -> None:
    assert draft_budget(COSTS, WORK, [TimedRow(target_ns, expected_tokens)], 6, 10) == budget


def test_the_tightest_target_binds_and_none_binds_nothing() -> None:
    rows = [TimedRow(1000.0, 1.0), TimedRow(180.0, 1.0)]
    assert draft_budget(COSTS, WORK, rows, 6, 10) == 1
    assert draft_budget(COSTS, WORK, [], 6, 10) is None


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
