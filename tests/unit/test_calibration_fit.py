"""From full-width rounds to a calibration: errors by hand, temperatures found again, files that the drafter reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_harness import TARGET, VANILLA_DRAFTER

from drafter_service.calibration import parse_calibration
from kernels.sampling import Regime
from launcher.calibrate import CalibrateOptions, _split, run_calibrate, table_of, write_calibration
from launcher.models import ModelPair
from launcher.settings import LauncherSettings
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings
from training.calibration_error import (
    Terms,
    mean_error,
    no_terms,
    position_bins,
    reliability,
    threshold_sweep,
)
from training.calibration_fit import fit_temperatures, fit_terms
from training.calibration_report import fit_regimes, halves
from training.rounds import Rounds, read_rounds

BLOCK = 4
TRUE = Terms([1.8, 1.2, 2.5, 1.0], [-0.6, 0.3, -0.2, 0.0])


def rounds_of(truth: Terms, count: int, seed: int) -> Rounds:
    """Rounds of a drafter whose logits need `truth` to be right."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.5, 1.5, (count, BLOCK))
    is_accepted = random.random((count, BLOCK)) < truth.confidences(logits)
    num_accepted = np.where(is_accepted.all(axis=1), BLOCK, is_accepted.argmin(axis=1))
    return Rounds(logits, num_accepted, np.arange(count) // 20)


def test_error_by_hand() -> None:
    predicted = np.array([0.02, 0.04, 0.5, 0.5, 1.0, 1.0])
    outcome = np.array([False, True, True, False, True, False])
    bins = reliability(predicted, outcome, num_bins=10)
    assert bins.counts.tolist() == [2, 2, 2]
    assert bins.observed.tolist() == [0.5, 0.5, 0.5]
    np.testing.assert_allclose(bins.predicted, [0.03, 0.5, 1.0])
    assert bins.error == pytest.approx((0.47 + 0.0 + 0.5) / 3)


def test_a_perfect_prediction_is_off_by_chance_alone() -> None:
    predicted = np.random.default_rng(0).random(3000)
    draws = [np.random.default_rng(seed).random(3000) < predicted for seed in range(1, 40)]
    errors = [reliability(predicted, outcome).error for outcome in draws]
    assert reliability(predicted, draws[0]).noise_floor == pytest.approx(np.mean(errors), rel=0.1)


def test_published_scaling_finds_temperatures() -> None:
    truth = Terms([2.0, 1.4, 3.0, 2.0], [0.0] * BLOCK)
    terms = fit_temperatures(rounds_of(truth, 20_000, 1))
    np.testing.assert_allclose(terms.temperatures[:3], truth.temperatures[:3], rtol=0.15)
    held_out = rounds_of(truth, 20_000, 2)
    before, after = (position_bins(held_out, each) for each in (no_terms(BLOCK), terms))
    assert mean_error(before) > 0.05
    assert mean_error(after) < 0.012
    assert all(bins.error < bins.noise_floor + 0.01 for bins in after)


def test_a_shift_is_found_where_temperatures_alone_do_not_do() -> None:
    fitted, held_out = rounds_of(TRUE, 20_000, 3), rounds_of(TRUE, 20_000, 4)
    terms = fit_terms(fitted)
    np.testing.assert_allclose(terms.temperatures, TRUE.temperatures, rtol=0.15)
    np.testing.assert_allclose(terms.shifts, TRUE.shifts, atol=0.12)
    errors = {
        name: mean_error(position_bins(held_out, each))
        for name, each in {"none": no_terms(BLOCK), "published": fit_temperatures(fitted), "ours": terms}.items()
    }
    assert errors["none"] > 0.1
    assert errors["published"] > 0.015
    assert errors["ours"] < 0.01


def test_a_position_that_few_rounds_reach_stays_as_the_one_before() -> None:
    rounds = rounds_of(Terms([1.5] * BLOCK, [-0.8, -6.0, 0.0, 0.0]), 3000, 5)
    assert rounds.num_reached(2) < 30
    terms = fit_terms(rounds)
    assert terms.shifts[1] < -3  # ten of twelve rounds behind it were accepted: its own shift would be above 0
    assert abs(terms.shifts[2] - terms.shifts[1]) < 1
    assert abs(terms.shifts[3] - terms.shifts[2]) < 0.5
    published = fit_temperatures(rounds)
    assert published.temperatures[1] == published.temperatures[2] == published.temperatures[3]


def test_unseen_positions_do_not_break_the_fit() -> None:
    rounds = rounds_of(TRUE, 2000, 6)
    rounds.logits[:, 2:] = np.nan
    short = Rounds(rounds.logits, np.minimum(rounds.num_accepted, 2), rounds.requests)
    terms = fit_terms(short)
    assert np.isfinite([*terms.temperatures, *terms.shifts]).all()
    assert mean_error(position_bins(short, terms)) < mean_error(position_bins(short, no_terms(BLOCK)))


def test_threshold_sweep_by_hand() -> None:
    confidences = np.array([[0.9, 0.8], [0.9, 0.4], [0.3, 0.9], [0.6, np.nan]])
    rounds = Rounds(np.log(confidences / (1 - confidences)), np.array([2, 1, 0, 1]), np.zeros(4, np.intp))
    zero, half, high = threshold_sweep(rounds, no_terms(2), [0.0, 0.5, 0.95])
    assert (zero.mean_verify_len, zero.acceptance_rate, zero.tokens_per_step) == (7 / 4, 4 / 7, 2.0)
    assert (half.mean_verify_len, half.acceptance_rate, half.tokens_per_step) == (1.0, 1.0, 2.0)
    assert (high.mean_verify_len, high.tokens_per_step) == (0.0, 1.0)
    assert np.isnan(high.acceptance_rate)


def row(request: int, confidences: list[Any], verify_len: int, num_accepted: int) -> dict[str, Any]:
    return {
        "request": request,
        "regime": "greedy",
        "confidences": confidences,
        "verify_len": verify_len,
        "num_accepted": num_accepted,
    }


def test_rounds_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        row(0, [0.5, 0.75, 1.0], 3, 2),
        row(0, [0.5, 0.75, 0.9], 2, 2),  # trimmed
        row(1, [0.5, None, 0.9], 1, 1),  # the window ended at a confidence that is none
        row(1, [], 0, 0),  # not drafted
        row(2, [0.25], 1, 0),  # the request's limit
    ]
    trace.write_text("".join(json.dumps({"rounds": each}) + "\n" for each in (rows[:2], [], rows[2:])))
    rounds = read_rounds(trace, 3)["greedy"]
    assert rounds.num_accepted.tolist() == [2, 1, 0]
    assert rounds.requests.tolist() == [0, 1, 2]
    np.testing.assert_allclose(rounds.logits[0], [0.0, np.log(3), 30.0])
    assert np.isnan(rounds.logits[1:, 1:]).all()
    assert (rounds.num_reached(0), rounds.num_reached(1), rounds.num_reached(2)) == (3, 1, 1)
    trace.write_text('{"rounds": []}\n{"step": 3}\n')
    with pytest.raises(ConfigurationError, match=r"trace\.jsonl:2 is no line of a trace"):
        read_rounds(trace, 3)
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_rounds(tmp_path / "none", 3)


def test_halves_share_no_answer() -> None:
    first, second = halves(rounds_of(TRUE, 400, 7))
    assert not set(first.requests) & set(second.requests)
    assert len(first) == len(second) == 200


def test_the_file_is_what_the_drafter_reads(tmp_path: Path) -> None:
    parts = [{regime: rounds_of(TRUE, 1000, seed) for regime in ("greedy", "coupled", "rejection")} for seed in (8, 9)]
    reports = fit_regimes(*parts)
    prints = {"drafter": "d", "target": "t"}
    out, plot = tmp_path / "calibration.json", tmp_path / "plot.png"
    write_calibration(out, plot, reports, {"format": 1, "block_size": BLOCK, "fingerprints": prints}, "a drafter")
    content = json.loads(out.read_text())
    terms = parse_calibration(content, out, BLOCK, prints)
    for regime in Regime:
        report = reports[regime.name.lower()]
        np.testing.assert_allclose(terms.temperatures[regime], report.terms.temperatures)
        np.testing.assert_allclose(terms.shifts[regime], report.terms.shifts)
    assert content["held_out"]["greedy"]["mean_ece_after"] < content["held_out"]["greedy"]["mean_ece_before"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert table_of(reports).row_count == 3 * (BLOCK + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json", "plot.png"]


def test_too_few_rounds_are_refused() -> None:
    rounds = {regime: rounds_of(TRUE, 1000, 10) for regime in ("greedy", "coupled", "rejection")}
    with pytest.raises(ConfigurationError, match="0 coupled rounds are too few, 300 are needed: give more prompts"):
        fit_regimes({name: each for name, each in rounds.items() if name != "coupled"}, rounds)
    with pytest.raises(ConfigurationError, match="20 greedy rounds are too few"):
        fit_regimes(rounds, {**rounds, "greedy": rounds_of(TRUE, 20, 11)})


def test_prompts_given_to_judge_are_not_fitted() -> None:
    fitted, judged = _split(rounds_of(TRUE, 400, 12), 15)
    assert set(fitted.requests) == set(range(15))
    assert set(judged.requests) == set(range(15, 20))


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    pair = ModelPair(TARGET, "target", VANILLA_DRAFTER, "")
    options = CalibrateOptions([tmp_path], out=tmp_path / "missing" / "calibration.json")
    with pytest.raises(
        ConfigurationError, match="missing cannot be written: give --out, and serve with DSPARK_DRAFTER"
    ):
        run_calibrate(options, pair, CommonSettings(), LauncherSettings())


def test_there_must_be_a_drafter(tmp_path: Path) -> None:
    pair = ModelPair(tmp_path, "target", None, "speculation off: --drafter none")
    with pytest.raises(ConfigurationError, match=r"nothing to calibrate without a drafter: .*--drafter none"):
        run_calibrate(CalibrateOptions([tmp_path]), pair, CommonSettings(), LauncherSettings())
