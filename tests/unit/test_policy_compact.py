"""The causal rule of `compact`: lossless by exact enumeration, order of admission, bad confidences."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.cost_table import CostTable
from scheduler_service.policy import DraftedBatch, create_policy
from scheduler_service.policy.compact import CompactPolicy, admission_order, num_admitted, survivals
from service_kit.errors import ConfigurationError

# DSpark, Appendix A: one request, two drafts, steps per second 1.0, 0.5, 0.45 at 1, 2, 3 token rows.
_STEP_NS = np.array([1 / 1.0, 1 / 0.5, 1 / 0.45])
_TARGET = {"A": 0.7, "B": 0.3}
_DRAFT = {"A": 0.5, "B": 0.5}
_CONFIDENCES = {"A": (0.8, 0.9), "B": (0.8, 0.0)}
"""The second confidence sees the first draft."""


def _causal(confidences: tuple[float, float]) -> int:
    survival = survivals(np.array([confidences], np.float32), [2])
    _, ordered = admission_order(survival)
    return num_admitted(ordered, 1, _STEP_NS[: ordered.size + 1])


def _global_search(confidences: tuple[float, float]) -> int:
    """Illegal: whether draft 1 is verified depends, through draft 2's confidence, on what draft 1 is."""
    expected = 1 + np.concatenate(([0.0], np.cumsum(np.cumprod(confidences))))
    return int(np.argmax(expected / _STEP_NS))


def _probability_of_a(rule: object) -> float:
    """P(first token = A), enumerating the draft, the acceptance and the residual."""
    total = 0.0
    residual = {token: max(_TARGET[token] - _DRAFT[token], 0.0) for token in _TARGET}
    for drafted, draft_probability in _DRAFT.items():
        if rule(_CONFIDENCES[drafted]) == 0:  # type: ignore[operator]
            total += draft_probability * _TARGET["A"]
            continue
        accept = min(1.0, _TARGET[drafted] / _DRAFT[drafted])
        recovered = residual["A"] / sum(residual.values())
        total += draft_probability * (accept * (drafted == "A") + (1 - accept) * recovered)
    return total


def test_appendix_a() -> None:
    assert [_causal(_CONFIDENCES[token]) for token in "AB"] == [0, 0]
    assert _probability_of_a(_causal) == pytest.approx(0.7, abs=1e-12)
    assert [_global_search(_CONFIDENCES[token]) for token in "AB"] == [2, 0]
    assert _probability_of_a(_global_search) == pytest.approx(0.85, abs=1e-12)


def test_ties_go_by_position_then_row() -> None:
    survival = np.array([[0.5, 0.5, 0.1], [0.5, 0.25, 0.25], [0.9, 0.5, 0.0]])
    rows, ordered = admission_order(survival)
    assert ordered.tolist() == [0.9, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.1]
    assert rows.tolist() == [2, 0, 1, 0, 2, 1, 1, 0]


@pytest.mark.parametrize("bad", [float("nan"), 1.01, -0.01, float("inf")])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_confidence_ends_the_window_from_its_position(bad: float, at: int) -> None:
    confidences = np.full((2, 4), 0.9, np.float32)
    confidences[0, at] = bad
    survival = survivals(confidences, [4, 3])
    assert np.count_nonzero(survival[0]) == at
    assert np.count_nonzero(survival[1]) == 3


def _table(step_ns: list[float], draft_ns: float = 0.0) -> CostTable:
    return CostTable(np.array(step_ns), np.array([0.0] + [draft_ns] * 8))


def test_free_rows_are_taken_and_dear_ones_are_not() -> None:
    batch = DraftedBatch(np.full((1, 4), 0.9, np.float32), [4], num_emitting=1, num_tokens=1)
    assert CompactPolicy(_table([0, 10, 10, 10, 10, 10])).verify_lens(batch) == [4]
    assert CompactPolicy(_table([0, 10, 20, 30, 40, 50])).verify_lens(batch) == [0]
    # Up to 3 rows cost nothing more, the 4th doubles the step.
    assert CompactPolicy(_table([0, 10, 10, 10, 25, 25])).verify_lens(batch) == [2]
    # A draft already paid for makes each further row relatively cheaper.
    assert CompactPolicy(_table([0, 10, 15, 20, 25, 30], 90)).verify_lens(batch) == [4]


def test_rows_compete_for_the_step() -> None:
    confidences = np.array([[0.9, 0.9], [0.3, 0.9], [0.8, 0.1]], np.float32)
    batch = DraftedBatch(confidences, [2, 2, 2], num_emitting=3, num_tokens=3)
    assert CompactPolicy(_table([0, 1, 1, 10, 12, 14, 16, 18, 20, 22])).verify_lens(batch) == [2, 0, 1]


def test_nothing_allowed_and_nothing_usable() -> None:
    policy = CompactPolicy(_table([0, 1, 1, 1, 1]))
    confidences = np.array([[0.9, 0.9], [np.nan, 0.9]], np.float32)
    assert policy.verify_lens(DraftedBatch(confidences, [0, 2], 2, 2)) == [0, 0]


@given(st.data())
def test_lengths_are_causal_and_within_limits(data: st.DataObject) -> None:
    """Changing what is behind a row's position k never changes whether k itself is verified."""
    num_rows, num_drafts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    unit = st.floats(0, 1, width=32)
    grid = st.lists(unit, min_size=num_rows * num_drafts, max_size=num_rows * num_drafts)
    confidences = np.array(data.draw(grid), np.float32).reshape(num_rows, num_drafts)
    limits = data.draw(st.lists(st.integers(0, num_drafts), min_size=num_rows, max_size=num_rows))
    costs = np.cumsum(data.draw(st.lists(st.floats(0, 2), min_size=40, max_size=40))) + 1.0
    policy = CompactPolicy(CostTable(costs, np.zeros(9)))
    lens = policy.verify_lens(DraftedBatch(confidences, limits, num_rows, num_rows))
    assert all(0 <= length <= limit for length, limit in zip(lens, limits, strict=True))
    for row, k in product(range(num_rows), range(num_drafts)):
        other = confidences.copy()
        other[row, k + 1 :] = data.draw(st.lists(unit, min_size=num_drafts - k - 1, max_size=num_drafts - k - 1))
        changed = policy.verify_lens(DraftedBatch(other, limits, num_rows, num_rows))
        assert (changed[row] > k) == (lens[row] > k)


def test_modes() -> None:
    assert create_policy("off", None) is None
    static = create_policy("static", None)
    assert static is not None
    batch = DraftedBatch(np.full((2, 3), np.nan, np.float32), [3, 1], 2, 2)
    assert static.verify_lens(batch) == [3, 1]
    with pytest.raises(ConfigurationError, match="needs a cost table"):
        create_policy("compact", None)
