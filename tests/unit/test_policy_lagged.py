"""The lagged rule of `compact`: whose confidences set the budget, and who gets it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from exact_rounds import FreeCosts
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.policy import DraftedBatch
from scheduler_service.policy.causal import CausalPolicy
from scheduler_service.policy.lagged import LaggedPolicy

# Verifying anything doubles the step; then up to 3 drafts are free, and any more doubles it again.
_JUMPS = FreeCosts((0, 1, 2, 2, 2, 4, 4, 4, 4))
_SURE, _UNSURE = (0.95, 0.95, 0.95), (0.2, 0.2, 0.2)


def _batch(rows: dict[str, Sequence[float]], **options: object) -> DraftedBatch:
    confidences = np.array(list(rows.values()), np.float32)
    limits = [confidences.shape[1]] * len(rows)
    return DraftedBatch(confidences, limits, len(rows), 1, row_keys=list(rows), **options)  # type: ignore[arg-type]


def _lens(policy: LaggedPolicy, **rows: Sequence[float]) -> list[int]:
    return policy.windows(_batch(rows)).verify_lens


def test_the_budget_crosses_a_jump_that_stops_the_causal_rule() -> None:
    assert CausalPolicy(_JUMPS).windows(_batch({"a": _SURE})).verify_lens == [0]
    policy = LaggedPolicy(_JUMPS)
    assert [_lens(policy, a=_SURE) for _ in range(2)] == [[3], [3]]


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_the_budget_follows_confidences_after_the_lag(lag: int) -> None:
    policy = LaggedPolicy(_JUMPS, lag)
    assert [_lens(policy, a=_SURE) for _ in range(lag)] == [[3]] * lag  # nothing known: whole
    assert [_lens(policy, a=_UNSURE) for _ in range(lag)] == [[3]] * lag  # still those from before
    assert _lens(policy, a=_SURE) == [0]


def test_the_budget_goes_to_the_best_current_drafts() -> None:
    policy = LaggedPolicy(_JUMPS)
    assert _lens(policy, a=_UNSURE, b=_UNSURE) == [2, 1]  # 3 rows are free; ties go by position, then row
    policy = LaggedPolicy(_JUMPS)
    assert _lens(policy, a=_UNSURE, b=_SURE) == [0, 3]


def test_each_row_has_its_own_history_wherever_it_stands() -> None:
    policy = LaggedPolicy(FreeCosts((0, 1, 1.4, 1.8, 2.2, 2.6, 3, 3.4, 3.8)))
    _lens(policy, a=_SURE, b=_UNSURE)
    apart = [_lens(policy, b=_SURE), _lens(policy, a=_SURE)]
    assert apart == [[0], [3]]


def test_an_older_block_is_looked_for_and_forgotten() -> None:
    policy = LaggedPolicy(_JUMPS)
    _lens(policy, a=_UNSURE)
    for _ in range(7):
        _lens(policy, b=_SURE)
    assert _lens(policy, a=_SURE) == [0]
    policy = LaggedPolicy(_JUMPS)
    _lens(policy, a=_UNSURE)
    for _ in range(8):
        _lens(policy, b=_SURE)
    assert _lens(policy, a=_SURE) == [3]  # by the running mean, which is nearly b's


def test_a_new_row_enters_with_the_running_mean() -> None:
    policy = LaggedPolicy(_JUMPS)
    assert _lens(policy, a=_UNSURE) == [3]
    assert _lens(policy, b=_SURE) == [0]
    policy = LaggedPolicy(FreeCosts((0, 1, 1.1, 1.2, 1.3)))
    assert _lens(policy, a=(0.2, float("nan"), 0.2)) == [1]
    # No usable confidence was seen at position 2, so it enters with 1: survivals 0.2, 0.2, 0.04 for a tenth of T each.
    assert _lens(policy, b=_SURE) == [2]


def test_rows_without_identity_share_the_mean() -> None:
    policy = LaggedPolicy(_JUMPS)
    unsure, sure = (DraftedBatch(np.array([c], np.float32), [3], 1, 1) for c in (_UNSURE, _SURE))
    assert [policy.windows(batch).verify_lens for batch in (unsure, sure)] == [[3], [0]]


def test_blocks_may_change_their_length() -> None:
    policy = LaggedPolicy(_JUMPS)
    assert _lens(policy, a=(0.2,)) == [0]
    assert _lens(policy, a=_SURE) == [0]  # behind what was drafted, the mean: nothing seen, so 1 · 0.2
    assert _lens(policy, a=(0.9,)) == [0]
    assert _lens(policy, c=(*_SURE, 0.9)) == [3]


def test_a_bound_and_weights() -> None:
    policy = LaggedPolicy(_JUMPS)
    assert policy.windows(_batch({"a": _SURE}, max_budget=2)).verify_lens == [2]
    assert policy.windows(_batch({"a": _SURE, "b": _UNSURE}, row_weights=(1, 90))).verify_lens == [1, 2]


@pytest.mark.parametrize("current", [_SURE, _UNSURE, (0.9, float("nan"), 0.9), (float("nan"),) * 3])
def test_what_this_step_drew_does_not_enter_its_budget(current: Sequence[float]) -> None:
    """Also not by a confidence that cannot be used."""
    policy = LaggedPolicy(FreeCosts(tuple(1 + 0.1 * tokens for tokens in range(12))))
    _lens(policy, a=_SURE, b=_SURE, c=_UNSURE)
    assert sum(_lens(policy, a=current, b=_SURE, c=_SURE)) == 6  # what a does not take goes to others


@given(st.data())
def test_the_budget_is_the_best_of_all(data: st.DataObject) -> None:
    num_rows, num_drafts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    grid = st.lists(st.floats(2**-7, 1, width=32), min_size=num_drafts, max_size=num_drafts)
    rows = {str(row): data.draw(grid) for row in range(num_rows)}
    token_ns = np.array(data.draw(st.lists(st.floats(0.1, 3), min_size=14, max_size=14)))
    policy = LaggedPolicy(FreeCosts(tuple(token_ns)))
    policy.windows(_batch(rows))
    lens = policy.windows(_batch(rows)).verify_lens
    survival = np.sort(np.cumprod(np.array(list(rows.values()), np.float32), axis=1, dtype=np.float64).ravel())[::-1]
    theta = [(num_rows + survival[:k].sum()) / token_ns[1 + k] for k in range(survival.size + 1)]
    assert theta[sum(lens)] == pytest.approx(max(theta))
