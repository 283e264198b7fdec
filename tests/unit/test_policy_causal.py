"""The causal rule of `compact`, and the arithmetic it shares with the others: order, limits, bad confidences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from exact_rounds import FreeCosts
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.policy import DraftedBatch, StepWork
from scheduler_service.policy.causal import CausalPolicy, num_until_drop
from scheduler_service.policy.survival import admission_order, survivals, throughput, usable_lens


def test_ties_go_by_position_then_row() -> None:
    survival = np.array([[0.5, 0.5, 0.1], [0.5, 0.25, 0.25], [0.9, 0.5, 0.0]])
    rows, gains = admission_order(survival)
    assert gains.tolist() == [0.9, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.1]
    assert rows.tolist() == [2, 0, 1, 0, 2, 1, 1, 0]


@pytest.mark.parametrize("bad", [float("nan"), 1.01, -0.01, float("inf")])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_confidence_ends_the_window_from_its_position_and_is_counted(bad: float, at: int) -> None:
    confidences = np.full((3, 4), 0.9, np.float32)
    confidences[0, at] = bad
    confidences[1, 3] = bad  # beyond the row's limit: nobody asks
    usable, num_invalid = usable_lens(confidences, [4, 3, 9])
    assert usable.tolist() == [at, 3, 4]
    assert num_invalid == 1
    survival = survivals(confidences, usable)
    assert np.count_nonzero(survival, axis=1).tolist() == [at, 3, 4]
    assert survival[2] == pytest.approx(np.float32(0.9) ** np.arange(1, 5))
    windows = CausalPolicy(FreeCosts((1.0,) * 20)).windows(DraftedBatch(confidences, [4, 3, 9], 3, 3))
    assert windows.verify_lens == windows.commit_lens == [at, 3, 4]
    assert windows.num_invalid == 1


def test_the_first_draft_that_does_not_raise_throughput_ends_the_step() -> None:
    gains = np.array([0.9, 0.5, 0.5])
    theta = throughput(gains, 2.0, np.array([1.0, 1.2, 2.0, 2.0]))
    assert theta.tolist() == pytest.approx([2.0, 2.9 / 1.2, 1.7, 1.95])
    assert num_until_drop(theta) == 1
    assert num_until_drop(np.array([1.0, 1.0])) == 0  # a tie costs rows and gains nothing
    assert num_until_drop(np.array([1.0, np.nan, 2.0])) == 0
    assert num_until_drop(np.array([1.0])) == 0


def test_free_rows_are_taken_and_dear_ones_are_not() -> None:
    batch = DraftedBatch(np.full((1, 4), 0.9, np.float32), [4], num_emitting=1, num_tokens=1)

    def lens(*token_ns: float) -> list[int]:
        return CausalPolicy(FreeCosts((0.0, *token_ns))).windows(batch).verify_lens

    assert lens(10, 10, 10, 10, 10) == [4]
    assert lens(10, 20, 30, 40, 50) == [0]
    assert lens(10, 10, 10, 25, 25) == [2]  # up to 3 rows cost nothing more, the 4th doubles the step
    assert lens(100, 105, 110, 115, 120) == [4]  # what is paid anyway makes each further row relatively cheaper


def test_rows_compete_for_the_step() -> None:
    confidences = np.array([[0.9, 0.9], [0.3, 0.9], [0.8, 0.1]], np.float32)
    policy = CausalPolicy(FreeCosts((0, 1, 1, 10, 12, 14, 16, 18, 20, 22)))
    assert policy.windows(DraftedBatch(confidences, [2, 2, 2], 3, 3)).verify_lens == [2, 0, 1]
    assert policy.windows(DraftedBatch(confidences, [2, 2, 2], 3, 3, max_budget=2)).verify_lens == [2, 0, 0]
    weighted = DraftedBatch(confidences, [2, 2, 2], 3, 3, row_weights=(1, 4, 0.1))
    assert policy.windows(weighted).verify_lens == [0, 2, 0]
    # Long contexts are dear to read: the second row's pays for itself no longer.
    distant = CausalPolicy(FreeCosts((1.0,) * 10, context_ns=0.01))
    near, far = (DraftedBatch(confidences, [2, 2, 2], 3, 3, contexts=[c, 9, 9]) for c in (9, 2000))
    assert distant.windows(near).verify_lens[0] == 2
    assert distant.windows(far).verify_lens[0] == 0


def test_costs_are_asked_for_the_step_as_it_is() -> None:
    asked: list[tuple[StepWork, list[float]]] = []

    class Costs:
        def total_ns(self, work: StepWork, contexts: np.ndarray) -> np.ndarray:
            asked.append((work, contexts.tolist()))
            return np.ones(contexts.size + 1)

    confidences = np.array([[0.5, 0.0], [0.9, 0.9]], np.float32)
    batch = DraftedBatch(confidences, [2, 1], 3, 40, contexts=[7, 8], num_rows=5, num_context=99.0)
    CausalPolicy(Costs()).windows(batch)
    work = StepWork(num_rows=5, num_drafted=2, num_tokens=40, num_context=99.0, block_len=2)
    assert asked == [(work, [8.0, 7.0])]


def test_nothing_allowed_and_nothing_usable() -> None:
    policy = CausalPolicy(FreeCosts((0, 1, 1, 1, 1)))
    confidences = np.array([[0.9, 0.9], [np.nan, 0.9]], np.float32)
    assert policy.windows(DraftedBatch(confidences, [0, 2], 2, 2)).verify_lens == [0, 0]


@given(st.data())
def test_windows_are_causal_and_within_limits(data: st.DataObject) -> None:
    """Changing what is behind a row's position k never changes whether k itself is verified."""
    num_rows, num_drafts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    unit = st.floats(0, 1, width=32)
    grid = st.lists(unit, min_size=num_rows * num_drafts, max_size=num_rows * num_drafts)
    confidences = np.array(data.draw(grid), np.float32).reshape(num_rows, num_drafts)
    limits = data.draw(st.lists(st.integers(0, num_drafts), min_size=num_rows, max_size=num_rows))
    policy = CausalPolicy(FreeCosts(tuple(data.draw(st.lists(st.floats(0.1, 3), min_size=25, max_size=25)))))
    lens = policy.windows(DraftedBatch(confidences, limits, num_rows, num_rows)).verify_lens
    assert all(0 <= length <= limit for length, limit in zip(lens, limits, strict=True))
    for row, k in product(range(num_rows), range(num_drafts)):
        other = confidences.copy()
        other[row, k + 1 :] = data.draw(st.lists(unit, min_size=num_drafts - k - 1, max_size=num_drafts - k - 1))
        changed = policy.windows(DraftedBatch(other, limits, num_rows, num_rows)).verify_lens
        assert (changed[row] > k) == (lens[row] > k)


@pytest.mark.parametrize("num_levels", [3, 10_000])
def test_ties_go_by_position_then_row_in_large_batches_too(num_levels: int) -> None:
    levels = np.random.default_rng(1).integers(0, num_levels, (200, 7)) / num_levels
    gains = np.minimum.accumulate(levels, axis=1)
    rows, ordered = admission_order(gains)
    wanted = sorted((-gains[row, k], k, row) for row in range(200) for k in range(7) if gains[row, k])
    assert [(-gain, row) for gain, row in zip(ordered, rows, strict=True)] == [(each[0], each[2]) for each in wanted]
