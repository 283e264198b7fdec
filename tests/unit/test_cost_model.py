"""The cost model and its fit: what is measured is found again, more work never costs less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.cost_model import CostModel, extended, shown_sizes
from scheduler_service.cost_model_fit import (
    DraftPoint,
    StepPoint,
    fit_costs,
    isotonic,
    non_negative_least_squares,
    relative_errors,
)
from scheduler_service.policy import StepWork
from service_kit.errors import ConfigurationError


def _model(**changes: object) -> CostModel:
    terms: dict[str, object] = {
        "bias_ns": 100.0,
        "row_ns": 10.0,
        "context_ns": 0.5,
        "token_ns": np.array([0, 0, 1, 2, 3, 10.0]),
        "block_draft_ns": {3: np.array([0, 20, 30.0]), 7: np.array([0, 40, 50.0])},
    }
    return CostModel(**{**terms, **changes})  # type: ignore[arg-type]


def test_terms_add_up() -> None:
    model, contexts = _model(), np.array([10.0, 20.0])
    assert model.total_ns(StepWork(2, 0, 2, 8.0), contexts).tolist() == [125, 131, 142]
    assert model.total_ns(StepWork(2, 2, 2, 8.0), contexts).tolist() == [175, 181, 192]
    assert model.total_ns(StepWork(2, 1, 2, 8.0, block_len=3), contexts).tolist() == [145, 151, 162]
    assert model.plain_ns(2, 2, 8.0) == 125


def test_the_drafter_runs_the_next_longer_block() -> None:
    model = _model()
    assert [model.draft_ns(1, length) for length in (0, 1, 3, 4, 7, 9)] == [40, 20, 20, 40, 40, 40]
    assert model.draft_ns(0, 3) == 0
    assert _model(block_draft_ns={}).draft_ns(2, 3) == 0


def test_beyond_the_last_size_it_goes_on_growing() -> None:
    flat_end = np.array([0, 0, 0, 6, 12, 12.0])
    assert extended(flat_end, 4, 4).tolist() == [12, 12, 16, 20, 24]  # slope of the upper half, not of the flat end
    assert _model().draft_ns(4, 7) == 70


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias_ns": -1.0}, "bias_ns is -1.0, not a time"),
        ({"context_ns": float("nan")}, "context_ns is nan"),
        ({"row_ns": float("inf")}, "row_ns is inf"),
        ({"bias_ns": 0.0, "row_ns": 0.0}, "no step is free"),
        ({"token_ns": np.array([0.0, 5.0, 4.0])}, "token_ns falls from 5 at 1 to 4 at 2"),
        ({"token_ns": np.array([0.0, np.nan])}, r"token_ns\[1\] is nan"),
        ({"token_ns": np.array([-2.0, 0.0])}, r"token_ns\[0\] is -2.0"),
        ({"token_ns": np.array([0.0])}, "token_ns needs at least"),
        ({"block_draft_ns": {7: np.array([0.0, 9.0, 8.0])}}, "block length 7 falls from 9 at 1"),
        ({"block_draft_ns": {7: np.array([1.0, 9.0])}}, "cost 0 for no rows"),
        ({"block_draft_ns": {0: np.array([0.0, 9.0])}}, "at least 1 draft"),
        ({"block_draft_ns": {3: np.array([0.0, 9.0]), 7: np.array([0.0, 8.0])}}, "7 must have .* none that is less"),
    ],
)
def test_costs_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _model(**changes)


def _grid(model: CostModel, noise: float, seed: int) -> tuple[list[StepPoint], list[DraftPoint]]:
    generator = np.random.default_rng(seed)
    steps = []
    for tokens in shown_sizes(64):
        for rows in {-(-tokens // 8), min(tokens, 16)}:
            for context in (64.0, 512.0):
                ns = model.plain_ns(rows, tokens, tokens * context)
                steps.append(StepPoint(rows, tokens, tokens * context, ns * generator.lognormal(0, noise)))
    drafts = [
        DraftPoint(rows, length, model.draft_ns(rows, length) * generator.lognormal(0, noise))
        for length in model.block_draft_ns
        for rows in shown_sizes(16)
    ]
    return steps, drafts


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bias=st.floats(1e6, 2e7),
    row=st.floats(0, 1e6),
    context=st.floats(0, 200),
    slope=st.floats(1e4, 2e6),
)
def test_a_known_model_is_found_again(seed: int, bias: float, row: float, context: float, slope: float) -> None:
    theta = np.maximum(0, np.arange(65) - 4) * slope
    truth = CostModel(bias, row, context, theta, {3: np.arange(17) * 1e6, 7: np.arange(17) * 2e6})
    steps, drafts = _grid(truth, 0.02, seed)
    fitted = fit_costs(steps, drafts, max_tokens=64, max_drafted=16)
    exact = relative_errors(fitted, *_grid(truth, 0.0, 0))
    assert np.abs(exact["step"]).max() < 0.08
    assert np.abs(exact["draft"]).max() < 0.08
    assert np.abs(exact["step"]).mean() < 0.02
    # Between and beyond the sizes of the grid, and at other contexts.
    for rows, tokens, read in ((5, 21, 4000.0), (1, 7, 9000.0), (9, 55, 20000.0)):
        assert fitted.plain_ns(rows, tokens, read) == pytest.approx(truth.plain_ns(rows, tokens, read), rel=0.1)


def test_without_noise_the_terms_themselves_are_found() -> None:
    truth = CostModel(9e6, 3e5, 120.0, np.maximum(0, np.arange(65) - 1) * 5e5, {})
    fitted = fit_costs(*_grid(truth, 0.0, 0), max_tokens=64, max_drafted=16)
    assert (fitted.bias_ns, fitted.row_ns, fitted.context_ns) == pytest.approx((9e6, 3e5, 120.0), rel=1e-6)
    assert fitted.token_ns == pytest.approx(truth.token_ns, abs=1.0)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_is_measured_the_model_is_one(data: st.DataObject) -> None:
    times = st.floats(1e3, 1e9)
    steps = data.draw(
        st.lists(st.builds(StepPoint, st.integers(1, 8), st.integers(1, 32), st.floats(0, 1e5), times), min_size=1)
    )
    drafts = data.draw(st.lists(st.builds(DraftPoint, st.integers(1, 8), st.sampled_from([3, 5, 7]), times)))
    model = fit_costs(steps, drafts, max_tokens=40, max_drafted=8, padded_rows=[1, 2, 4, 4])  # checks itself
    assert model.token_ns[3] == model.token_ns[4]
    totals = [model.total_ns(StepWork(1, rows, 1, 0.0, 5), np.zeros(60)) for rows in range(12)]
    assert (np.diff(totals, axis=0) >= 0).all()
    assert (np.diff(totals, axis=1) >= 0).all()
    assert (totals[0][1:] > 0).all()


def test_errors_count_relative_to_what_was_measured() -> None:
    points = [StepPoint(1, 1, 0.0, 10.0), StepPoint(1, 1, 0.0, 20.0)]
    assert fit_costs(points, [], max_tokens=1, max_drafted=1).plain_ns(1, 1, 0.0) == pytest.approx(12.0)


def test_padding_makes_steps() -> None:
    points = [StepPoint(1, tokens, 0.0, 10.0 * tokens) for tokens in (1, 4, 8)]
    model = fit_costs(points, [], max_tokens=16, max_drafted=4, padded_rows=[1, 4, 4, 4, 8, 8, 8, 8])
    step = [model.plain_ns(1, tokens, 0.0) for tokens in range(1, 10)]
    assert step == pytest.approx([10, 40, 40, 40, 80, 80, 80, 80, 90])


def test_a_spike_is_shared_with_its_neighbours() -> None:
    assert isotonic([10, 50, 30, 60]).tolist() == [10, 40, 40, 60]
    points = [StepPoint(1, tokens, 0.0, ns) for tokens, ns in ((1, 10.0), (2, 50.0), (4, 30.0), (8, 90.0))]
    model = fit_costs(points, [], max_tokens=16, max_drafted=4)
    assert model.plain_ns(1, 2, 0.0) == pytest.approx(model.plain_ns(1, 4, 0.0))
    assert 30 < model.plain_ns(1, 4, 0.0) < 50
    assert model.plain_ns(1, 8, 0.0) == pytest.approx(90)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 12))
def test_non_negative_least_squares_is_optimal(seed: int, num_terms: int, num_points: int) -> None:
    generator = np.random.default_rng(seed)
    matrix, values = generator.normal(size=(num_points, num_terms)), generator.normal(size=num_points)
    x = non_negative_least_squares(matrix, values)
    gradient = matrix.T @ (matrix @ x - values)
    assert (x >= 0).all()
    assert gradient[x > 0] == pytest.approx(0, abs=1e-7)  # nothing to gain by moving what is free to move
    assert (gradient > -1e-7).all()  # nor by raising what is 0


def test_it_says_what_it_is() -> None:
    text = str(_model(bias_ns=2e6))
    assert "bias 2.00" in text
    assert "δ by rows of 7 drafts" in text
