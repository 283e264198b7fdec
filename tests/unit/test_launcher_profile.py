"""What `dspark profile` tells and draws, and what `dspark serve` shows while the scheduler measures."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from launcher.models import ModelPair
from launcher.profile import ProfileOptions, describe, run_profile
from launcher.profile_plot import fit_published, plot_costs
from launcher.settings import LauncherSettings
from scheduler_service.calibrate_cost import Measurements
from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_fit import DraftPoint, StepPoint
from scheduler_service.cost_progress import log_progress, progress_in
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings

MODEL = CostModel(9e6, 2e5, 40.0, np.maximum(0, np.arange(129) - 1) * 3e5, {7: np.arange(17) * 2e6})
STEPS = [
    StepPoint(rows, tokens, tokens * context, MODEL.plain_ns(rows, tokens, tokens * context))
    for tokens in (1, 2, 8, 16, 64, 96, 128)
    for rows in sorted({-(-tokens // 8), min(16, tokens)})
    for context in (64.0, 512.0)
]
MEASURED = Measurements(STEPS, [DraftPoint(rows, 7, MODEL.draft_ns(rows, 7)) for rows in (1, 4, 16)], 0.03)


def test_the_published_fit_is_the_published_one() -> None:
    # Two bins of 64 token rows and three row counts, made of the fit's own terms: found again.
    points = [
        StepPoint(rows, tokens, 0.0, 5.0 + {1: 0.0, 4: 3.0, 16: 9.0}[rows] + (20.0 if tokens > 64 else 0.0))
        for rows in (1, 4, 16)
        for tokens in (16, 64, 65, 128)
    ]
    fit = fit_published(points)
    assert [fit.step_ns(point.num_rows, point.num_tokens) for point in points if point.num_tokens in (16, 128)] == (
        pytest.approx([point.ns for point in points if point.num_tokens in (16, 128)])
    )
    assert fit.step_ns(10, 16) == pytest.approx(5.0 + 6.0)  # linear between probes
    assert fit.step_ns(99, 999) == fit.step_ns(16, 128)  # and constant beyond them


def test_a_plot_is_written(tmp_path: Path) -> None:
    plot_costs(MODEL, MEASURED, "a toy", tmp_path / "new" / "costs.png")
    assert (tmp_path / "new" / "costs.png").read_bytes().startswith(b"\x89PNG")


def test_the_fit_is_told_in_words() -> None:
    text = "\n".join(describe(MODEL, MEASURED))
    assert "bias 9.00" in text
    assert f"step: {len(STEPS)} shapes, the fit is off by 0.0 % (median)" in text
    assert "draft: 3 shapes" in text
    assert "off their shape's median by 3.0 %" in text


def test_without_a_drafter_there_is_nothing_to_profile(tmp_path: Path) -> None:
    pair = ModelPair(tmp_path, "toy", None, "no drafter fits toy")
    with pytest.raises(ConfigurationError, match="no drafter fits toy"):
        run_profile(ProfileOptions(tmp_path / "costs.json"), pair, CommonSettings(), LauncherSettings())


def test_progress_goes_through_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tell = log_progress()
    for share in (0.0, 0.04, 0.31, 0.39, 1.0):
        tell(share)
    lines = [f"12:00:00 INFO scheduler {message}" for message in caplog.messages]
    assert [line.rpartition(": ")[2] for line in lines] == ["0 %", "30 %", "100 %"]
    assert progress_in(lines[:2]) == "measuring what steps cost, once for this engine: 30 %"
    assert progress_in([*lines, "serving toy"]) == ""
    assert progress_in([]) == ""
