"""The calibration beside a drafter: applied by regime and position, refused for anything it was not fitted for."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_harness import TARGET, VANILLA_DRAFTER, make_checkpoint

from drafter_service.calibration import FILE_NAME, fingerprints, load_calibration
from drafter_service.pair import Pair, check_pair
from kernels.sampling import Regime
from service_kit.errors import ConfigurationError

LOGITS = np.array([[2.0, -1.0, 0.5, 9.0], [2.0, -1.0, 0.5, np.nan], [2.0, -1.0, 0.5, np.inf]], np.float32)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    shutil.copytree(VANILLA_DRAFTER, tmp_path / "drafter")
    return check_pair(tmp_path / "drafter", TARGET)


def content(pair: Pair) -> dict[str, Any]:
    """A good file: distinct numbers everywhere."""
    names = [regime.name.lower() for regime in Regime]
    size = pair.config.block_size
    return {
        "format": 1,
        "block_size": size,
        "fingerprints": fingerprints(pair),
        "weight_formats": {"drafter": "float32", "target": "q4"},
        "temperatures": {name: [1.0 + 0.5 * i + 0.1 * k for k in range(size)] for i, name in enumerate(names)},
        "shifts": {name: [0.1 * i - 0.05 * k for k in range(size)] for i, name in enumerate(names)},
    }


def write(pair: Pair, given: Any) -> Path:
    path = pair.drafter.directory / FILE_NAME
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return path


def test_each_regime_and_position_has_its_own_terms(pair: Pair) -> None:
    path = write(pair, given := content(pair))
    calibration = load_calibration("auto", pair, "float32")
    assert calibration.words == f"{path} (fitted with q4 target weights)"
    regimes = [Regime.REJECTION, Regime.GREEDY, Regime.COUPLED]
    found = calibration.confidences(LOGITS, regimes)
    for row, regime in enumerate(regimes):
        name = regime.name.lower()
        scaled = LOGITS[row] / np.array(given["temperatures"][name][:4]) + np.array(given["shifts"][name][:4])
        np.testing.assert_allclose(found[row], 1 / (1 + np.exp(-scaled)), rtol=1e-6)
    assert np.isnan(found[1, 3])
    assert found[2, 3] == 1.0


def test_without_a_file_confidences_are_the_heads_own(pair: Pair) -> None:
    for setting, reason in (("auto", "no calibration.json"), ("none", "DSPARK_DRAFTER_CALIBRATION is none")):
        calibration = load_calibration(setting, pair, "float32")
        assert calibration.words.startswith(f"none ({reason}")
        found = calibration.confidences(LOGITS[:1, :3], [Regime.COUPLED])
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-LOGITS[:1, :3])), rtol=1e-6)


def test_none_ignores_the_file_and_a_path_finds_another(pair: Pair, tmp_path: Path) -> None:
    path = write(pair, content(pair))
    assert load_calibration("none", pair, "float32").words.startswith("none")
    elsewhere = tmp_path / "mine.json"
    path.rename(elsewhere)
    assert str(elsewhere) in load_calibration(str(elsewhere), pair, "float32").words
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_calibration(str(path), pair, "float32")


def test_a_drafter_without_a_confidence_head_needs_none(tmp_path: Path) -> None:
    def drop_head(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("confidence_head")]:
            del tensors[name]

    changes = {"enable_confidence_head": False}
    pair = check_pair(make_checkpoint(tmp_path / "headless", changes, drop_head), TARGET)
    write(pair, "{}")
    assert "no confidence head" in load_calibration("auto", pair, "float32").words


def test_the_file_does_not_change_the_drafters_fingerprint(pair: Pair) -> None:
    write(pair, content(pair))
    after = check_pair(pair.drafter.directory, TARGET)
    assert after.drafter.fingerprint == pair.drafter.fingerprint
    assert fingerprints(after) == fingerprints(pair)


def test_another_training_of_the_same_shape_is_another_drafter(pair: Pair, tmp_path: Path) -> None:
    def retrain(tensors: dict[str, np.ndarray]) -> None:
        tensors["confidence_head.proj.weight"] += 0.01

    other = check_pair(make_checkpoint(tmp_path / "retrained", {}, retrain), TARGET)
    write(other, content(pair))
    expected = f"another drafter: {fingerprints(pair)['drafter']} there, {fingerprints(other)['drafter']} here"
    with pytest.raises(ConfigurationError, match=expected):
        load_calibration("auto", other, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "is of format 2, not 1"),
        ({"block_size": 5}, "is for blocks of 5 drafts, the drafter's have 7"),
        ({"fingerprints": {}}, "another drafter: None there, "),
        ({"fingerprints": 3}, "another drafter: None there, "),
        ({"temperatures": {"greedy": [1.0] * 7}}, r"for the regimes \['greedy'\], not \['coupled', 'greedy', 'reje"),
        ({"temperatures": None}, "for the regimes None, not"),
        ({"shifts": {}}, r"has shifts for the regimes \[\], not"),
    ],
)
def test_a_file_for_something_else_is_refused(pair: Pair, change: dict[str, Any], message: str) -> None:
    path = write(pair, content(pair) | change)
    with pytest.raises(ConfigurationError, match=message) as refused:
        load_calibration("auto", pair, "float32")
    assert str(refused.value).startswith(f"calibration {path} ")
    assert f"dspark calibrate --out {path}" in str(refused.value)
    assert "DSPARK_DRAFTER_CALIBRATION to none" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("temperatures", [1.0] * 6, "not 7 of them"),
        ("temperatures", [1.0] * 6 + [0.0], r"has a temperature of 0\.0"),
        ("temperatures", [1.0] * 6 + [-2.0], r"has a temperature of -2\.0"),
        ("temperatures", [1.0] * 6 + [float("nan")], "has nan among its coupled temperatures"),
        ("temperatures", [1.0] * 6 + [True], "has True among its coupled temperatures"),
        ("shifts", [1.0] * 6 + ["a"], "has 'a' among its coupled shifts"),
        ("shifts", [0.0] * 6 + [float("inf")], "has inf among its coupled shifts"),
        ("shifts", 0.0, "not 7 of them"),
    ],
)
def test_terms_that_cannot_be_are_refused(pair: Pair, key: str, values: Any, message: str) -> None:
    given = content(pair)
    given[key]["coupled"] = values
    write(pair, given)
    with pytest.raises(ConfigurationError, match=message):
        load_calibration("auto", pair, "float32")


@pytest.mark.parametrize("given", ["", "[]", "3", "{"])
def test_something_else_under_the_name_is_refused(pair: Pair, given: str) -> None:
    write(pair, given)
    with pytest.raises(ConfigurationError, match=r"calibration .*calibration\.json (cannot be read|is of format)"):
        load_calibration("auto", pair, "float32")


def test_other_weights_of_the_drafter_are_a_warning(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    write(pair, content(pair))
    with caplog.at_level(logging.WARNING):
        load_calibration("auto", pair, "q8")
    assert "fitted with float32 weights, these are q8" in caplog.text
