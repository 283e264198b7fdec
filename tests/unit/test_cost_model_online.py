"""The online correction: follows the machine, shrugs spikes off, forgets, stays monotone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.ledger import Ledger
from scheduler_service.policy import StepWork

NONE = np.empty(0)


def _model(factor: float = 1.0) -> CostModel:
    theta = np.maximum(0, np.arange(129) - 1) * 5e5 * factor
    drafts = {length: np.arange(17) * 2e5 * length * factor for length in (3, 7)}
    return CostModel(10e6 * factor, 1e5 * factor, 50.0 * factor, theta, drafts)


def _feed(online: OnlineCosts, truth: CostModel, works: list[StepWork], factor: float = 1.0) -> None:
    for work in works:
        step_ns = factor * float(truth.step_ns(work, NONE)[0])
        online.observe(work, step_ns=step_ns, draft_ns=factor * truth.draft_ns(work.num_drafted, work.block_len))


def _works(count: int, seed: int = 0) -> list[StepWork]:
    generator = np.random.default_rng(seed)
    return [
        StepWork(rows, int(generator.integers(0, rows + 1)), tokens, 300.0 * tokens, int(generator.choice([3, 7])))
        for rows, tokens in (
            (int(rows), int(rows * generator.integers(1, 8))) for rows in generator.integers(1, 17, count)
        )
    ]


def _total(costs: OnlineCosts | CostModel, work: StepWork) -> float:
    return float(costs.total_ns(work, NONE)[0])


def test_it_predicts_the_model_until_something_is_measured() -> None:
    model, contexts = _model(), np.full(9, 300.0)
    online = OnlineCosts(model)
    for work in _works(20):
        assert online.total_ns(work, contexts) == pytest.approx(model.total_ns(work, contexts))
        assert online.plain_ns(*work[:1], *work[2:4]) == pytest.approx(model.plain_ns(work[0], work[2], work[3]))
        assert online.draft_ns(work.num_drafted, 3) == pytest.approx(model.draft_ns(work.num_drafted, 3))
    assert online.step_errors.num_measured == 0


@pytest.mark.parametrize("factor", [0.5, 1.3, 3.0])
def test_drift_is_followed_everywhere(factor: float) -> None:
    online, truth = OnlineCosts(_model()), _model(factor)
    _feed(online, truth, _works(300))
    for work in _works(30, seed=1):
        assert _total(online, work) == pytest.approx(_total(truth, work), rel=0.03)
    unseen = StepWork(16, 0, 128, 1000.0)
    assert _total(online, unseen) == pytest.approx(_total(truth, unseen), rel=0.1)


def test_drift_while_nothing_is_drafted_reaches_the_draft_pass() -> None:
    online, truth = OnlineCosts(_model()), _model(2.0)
    _feed(online, truth, [work._replace(num_drafted=0) for work in _works(300)])
    assert online.draft_errors.num_measured == 0
    assert online.draft_ns(4, 7) == pytest.approx(truth.draft_ns(4, 7), rel=0.1)


def test_a_spike_does_not_poison() -> None:
    model = _model()
    online, work = OnlineCosts(model), StepWork(4, 4, 20, 4000.0, 7)
    _feed(online, model, [work], factor=50.0)
    assert online.step_errors.num_capped == online.draft_errors.num_capped == 1
    assert _total(online, work) < 1.05 * _total(model, work)
    _feed(online, model, [work] * 40)
    assert _total(online, work) == pytest.approx(_total(model, work), rel=0.01)


def test_a_size_that_once_looked_dear_becomes_reachable_again() -> None:
    model = _model()
    online, dear = OnlineCosts(model), StepWork(4, 0, 24, 1000.0)
    for _ in range(40):
        _feed(online, model, [dear], factor=3.0)
        _feed(online, model, [StepWork(4, 0, 4, 1000.0)])
    looked = _total(online, dear) / _total(model, dear)
    _feed(online, model, [StepWork(4, 0, 4, 1000.0)] * 2000)  # the size itself is avoided
    assert looked > 1.2
    assert _total(online, dear) == pytest.approx(_total(model, dear), rel=0.05)


def test_a_curve_of_another_shape_is_learned() -> None:
    truth = CostModel(10e6, 1e5, 50.0, np.where(np.arange(129) > 16, 20e6, 0.0), _model().block_draft_ns)
    online = OnlineCosts(_model())
    before = [abs(_total(online, work) / _total(truth, work) - 1) for work in _works(50, seed=2)]
    _feed(online, truth, _works(1500))
    after = [abs(_total(online, work) / _total(truth, work) - 1) for work in _works(50, seed=2)]
    assert np.mean(after) < 0.4 * np.mean(before)


def test_plain_steps_may_be_cheaper_than_those_beside_a_draft_pass() -> None:
    model = _model()
    online = OnlineCosts(model)
    for drafted in range(2000):
        work = StepWork(4, 4 * (drafted % 2), 8, 1000.0, 7)
        factor = 1.1 if work.num_drafted else 0.95
        online.observe(
            work, step_ns=factor * model.plain_ns(4, 8, 1000.0), draft_ns=model.draft_ns(work.num_drafted, 7)
        )
    assert online.plain_ns(4, 8, 1000.0) == pytest.approx(0.95 * model.plain_ns(4, 8, 1000.0), rel=0.02)
    drafted_ns = _total(online, StepWork(4, 4, 8, 1000.0, 7)) - online.draft_ns(4, 7)
    assert drafted_ns == pytest.approx(1.1 * model.plain_ns(4, 8, 1000.0), rel=0.02)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 2.0))
def test_more_work_never_costs_less(seed: int, noise: float) -> None:
    model = _model()
    online, generator = OnlineCosts(model), np.random.default_rng(seed)
    for work in _works(60, seed):
        _feed(online, model, [work], factor=float(generator.lognormal(0, noise)))
    by_tokens = online.total_ns(StepWork(4, 2, 1, 100.0, 3), np.zeros(200))
    assert (np.diff(by_tokens) >= 0).all()
    assert (by_tokens > 0).all()
    assert (np.diff([online.draft_ns(rows, 7) for rows in range(24)]) >= 0).all()


def test_errors_are_counted_as_they_were_predicted() -> None:
    online, work = OnlineCosts(_model()), StepWork(1, 0, 1, 0.0)
    for _ in range(2):
        online.observe(work, step_ns=12e6)
    counters = online.step_errors
    assert (counters.num_measured, counters.num_capped, counters.measured_ns) == (2, 0, 24e6)
    assert counters.predicted_ns > 2 * 10.1e6  # the second prediction had learned
    assert counters.error_ns == pytest.approx(24e6 - counters.predicted_ns)


def test_the_ledger_holds_the_sums() -> None:
    online, ledger = OnlineCosts(_model()), Ledger()
    _feed(online, _model(9.0), _works(5))
    steps, drafts = online.step_errors, online.draft_errors
    ledger.set_prediction_errors(steps, drafts)
    assert ledger.num_predictions == 5 + drafts.num_measured > 5
    assert ledger.num_capped_errors == steps.num_capped + drafts.num_capped > 0
    assert ledger.predicted_ns == pytest.approx(steps.predicted_ns + drafts.predicted_ns)
    assert ledger.predicted_measured_ns == pytest.approx(steps.measured_ns + drafts.measured_ns)
    assert ledger.prediction_error_ns == pytest.approx(steps.error_ns + drafts.error_ns)


def test_what_is_no_measurement_changes_nothing() -> None:
    model = _model()
    online, work = OnlineCosts(model), StepWork(2, 2, 4, 0.0, 3)
    online.observe(work, step_ns=0.0, draft_ns=0.0)
    online.observe(work._replace(num_drafted=0), step_ns=-1.0, draft_ns=5e6)
    assert online.step_errors.num_measured == online.draft_errors.num_measured == 0
    assert _total(online, work) == _total(model, work)
