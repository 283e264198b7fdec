"""Which steps leave their windows to the verifier: settled before drafting, never beside rows that ask for more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exact_rounds import FreeCosts

from kernels.sampling import LogitControls, Regime
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.draft_gate import DraftDecision
from scheduler_service.executor_types import BlockRow, DraftResult
from scheduler_service.ledger import Ledger
from scheduler_service.policy.lagged import LaggedPolicy
from scheduler_service.step_plan import PlannedRow, StepPlan
from scheduler_service.windows import WindowChooser

NUM_SLOTS = 3


class _Sequence(SimpleNamespace):
    __hash__ = object.__hash__


def row(
    *, priority: float = 1.0, max_drafts: int = 0, start: int = 9, num_tokens: int = 1, **changes: Any
) -> PlannedRow:
    fields = {"controls": LogitControls(), "num_logprobs": None, "priority": priority}
    request = SimpleNamespace(**{**fields, **{key: changes[key] for key in fields if key in changes}})
    sampling = SimpleNamespace(regime=Regime.GREEDY)
    sequence: Any = _Sequence(
        request=request, sampling=sampling, matcher=changes.get("matcher"), context_lost=changes.get("context_lost", "")
    )
    return PlannedRow(sequence, start, num_tokens, emits=True, max_drafts=max_drafts)


def plan_of(*rows: PlannedRow) -> StepPlan:
    drafted = [each for each in rows if each.max_drafts][::-1]
    decision = DraftDecision(list(range(len(drafted))), NUM_SLOTS)
    return StepPlan(rows=list(rows), drafted=drafted, decision=decision)


def chooser(*, settles: bool = True) -> WindowChooser:
    policy = LaggedPolicy(FreeCosts((0, 1, 1, 1, 1, 1, 9, 9, 9, 9, 9)), settles_budget=settles)
    return WindowChooser(policy, CalibrationMonitor(NUM_SLOTS), Ledger())


def test_a_settled_step_is_filled_in_by_the_verifiers_answer() -> None:
    plan, windows = plan_of(row(max_drafts=2, priority=2.0), row(start=0, num_tokens=2), row(max_drafts=3)), chooser()
    assert windows.settles_budgets
    windows.settle(plan)
    assert plan.budget == 1  # the jump is behind five token rows, four of which are no drafts
    assert plan.block_rows() == [BlockRow(2, 3, 1.0), BlockRow(0, 2, 2.0)]
    assert windows.odds().tolist() == [[1.0] * NUM_SLOTS] * 2  # type: ignore[union-attr]
    confidences = np.array([[0.5, np.nan, 0.5], [0.25, 0.5, 0.5]], np.float32)
    windows.take(plan, DraftResult([1, 2, 3, 4, 5, 6], confidences, np.full((2, 3), np.nan, np.float32), {}, 0))
    assert plan.windows is None
    windows.fill(plan, [1, 0, 0])
    assert plan.windows is not None
    assert plan.windows.verify_lens == plan.windows.commit_lens == [0, 1]
    assert plan.windows.num_invalid == 1
    assert [list(each.drafts) for each in plan.rows] == [[4], [], []]
    assert [list(each.block_ids) for each in plan.rows] == [[4, 5], [], [1, 2, 3]]
    assert [each.commit_len for each in plan.rows] == [1, 0, 0]


def test_a_row_whose_context_was_lost_has_no_block() -> None:
    plan, windows = plan_of(row(max_drafts=2), row(max_drafts=3)), chooser()
    windows.settle(plan)
    plan.rows[1].sequence.context_lost = "gone"
    result = DraftResult([1] * 6, np.full((2, 3), 0.5, np.float32), np.full((2, 3), np.nan, np.float32), {}, 0)
    windows.take(plan, result)
    windows.fill(plan, [1, 0])
    assert [list(each.block_ids) for each in plan.rows] == [[1, 1], []]


@pytest.mark.parametrize(
    "other",
    [{"matcher": object()}, {"controls": LogitControls(min_tokens=2, stop_token_ids=(1,))}, {"num_logprobs": 0}],
)
def test_rows_that_ask_for_more_send_the_step_the_usual_way(other: dict[str, Any]) -> None:
    plan = plan_of(row(max_drafts=2), row(**other))
    chooser().settle(plan)
    assert plan.budget is None
    assert plan.block_rows() == []


def test_audits_and_rules_that_need_confidences_send_it_the_usual_way() -> None:
    plan = plan_of(row(max_drafts=2))
    plan.drafted[0].is_audit = True
    chooser().settle(plan)
    assert plan.budget is None
    unsettled = chooser(settles=False)
    assert not unsettled.settles_budgets


def test_confidences_that_come_after_the_step_was_sent_set_the_next_budget() -> None:
    rows, windows = [row(max_drafts=2), row(max_drafts=3)], chooser()
    plan = plan_of(*rows)
    windows.settle(plan)
    assert plan.budget == 3
    result = DraftResult([1] * 6, np.zeros((2, 3), np.float32), np.full((2, 3), np.nan, np.float32), {}, 0)
    windows.take(plan, result)
    windows.fill(plan, [0, 0])
    following = plan_of(*rows)
    windows.settle(following)
    assert following.budget == 0
