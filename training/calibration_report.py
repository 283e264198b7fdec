"""From full-width rounds to the content of `calibration.json`, and what it says in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from service_kit.errors import ConfigurationError
from training.calibration_error import Bins, SweepPoint, Terms, mean_error, no_terms, position_bins, threshold_sweep
from training.calibration_fit import fit_temperatures, fit_terms
from training.rounds import Rounds

REGIMES = ("greedy", "coupled", "rejection")
THRESHOLDS = [round(0.1 * step, 1) for step in range(10)]
_MIN_ROUNDS = 300


class RegimeReport(NamedTuple):
    """One regime: its terms, and how they do on held-out rounds."""

    terms: Terms
    num_fitted: int
    """Rounds fitted on."""
    before: list[Bins]
    temperatures_only: list[Bins]
    """With the published scaling, fitted on the same rounds."""
    after: list[Bins]
    """Reliability by position, on held-out rounds."""
    sweep: list[SweepPoint]
    """With calibrated confidences, on held-out rounds."""


def halves(rounds: Rounds) -> tuple[Rounds, Rounds]:
    """Splits by request, so that no answer is in both."""
    requests = np.unique(rounds.requests)
    return rounds.of_requests(requests[::2]), rounds.of_requests(requests[1::2])


def fit_regimes(fit: Mapping[str, Rounds], held_out: Mapping[str, Rounds]) -> dict[str, RegimeReport]:
    """Fits every regime. Raises ConfigurationError if one has too few rounds."""
    reports = {}
    for regime in REGIMES:
        for rounds in (fit.get(regime), held_out.get(regime)):
            if rounds is None or len(rounds) < _MIN_ROUNDS:
                raise ConfigurationError(
                    f"{0 if rounds is None else len(rounds)} {regime} rounds are too few, {_MIN_ROUNDS} are needed: "
                    "give more prompts, or raise --limit or --max-tokens",
                    field="--prompts",
                )
        own, other = fit[regime], held_out[regime]
        terms = fit_terms(own)
        reports[regime] = RegimeReport(
            terms,
            len(own),
            position_bins(other, no_terms(other.block_size)),
            position_bins(other, fit_temperatures(own)),
            position_bins(other, terms),
            threshold_sweep(other, terms, THRESHOLDS),
        )
    return reports


def file_content(reports: Mapping[str, RegimeReport], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the file holds besides its format: `about`, the terms, and how good they are."""
    return {
        **about,
        "temperatures": {regime: report.terms.temperatures for regime, report in reports.items()},
        "shifts": {regime: report.terms.shifts for regime, report in reports.items()},
        "num_rounds_fitted": {regime: report.num_fitted for regime, report in reports.items()},
        "held_out": {regime: _held_out(report) for regime, report in reports.items()},
    }


def _held_out(report: RegimeReport) -> dict[str, Any]:
    named = {"before": report.before, "temperatures_only": report.temperatures_only, "after": report.after}
    return {
        "num_rounds": [int(bins.counts.sum()) for bins in report.after],
        **{f"ece_{name}": [round(each.error, 5) for each in bins] for name, bins in named.items()},
        **{f"mean_ece_{name}": round(mean_error(bins), 5) for name, bins in named.items()},
        "ece_of_chance": [round(each.noise_floor, 5) for each in report.after],
        "threshold_sweep": [
            {name: None if np.isnan(value) else round(value, 4) for name, value in point._asdict().items()}
            for point in report.sweep
        ],
    }
