"""Confidences that mean what they say, by a file that travels with the drafter.

`dspark calibrate` writes `calibration.json`: for each regime (drafts are accepted by another rule in each) and position
a temperature T and a shift s, so that σ(logit / T + s) is the probability (`training/calibration_fit.py`). The file
says what it was fitted for and is refused for anything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drafter_service.pair import Pair
from kernels.sampling import Regime
from service_kit.errors import ConfigurationError

log = logging.getLogger(__name__)

FILE_NAME = "calibration.json"
FORMAT = 1
SETTING = "DSPARK_DRAFTER_CALIBRATION"
_HEAD = "confidence_head.proj.weight"


@dataclass(frozen=True)
class Calibration:
    """What is applied to confidence logits."""

    temperatures: npt.NDArray[np.float32]
    """[highest regime + 1, block size], positive."""
    shifts: npt.NDArray[np.float32]
    """The same, added to the scaled logits."""
    words: str
    """What is applied, for people."""

    def confidences(self, logits: npt.NDArray[np.float32], regimes: Sequence[Regime]) -> npt.NDArray[np.float32]:
        """[B, n] probabilities of logits [B, n] with the regime of each row. NaN stays NaN: the window ends there."""
        rows, length = list(regimes), logits.shape[1]
        scaled = logits / self.temperatures[rows, :length] + self.shifts[rows, :length]
        with np.errstate(over="ignore"):
            confidences: npt.NDArray[np.float32] = np.float32(1) / (1 + np.exp(-scaled))
        return confidences


def uncalibrated(block_size: int, reason: str) -> Calibration:
    """Leaves confidences as the drafter's head gives them."""
    shape = (max(Regime) + 1, block_size)
    return Calibration(np.ones(shape, np.float32), np.zeros(shape, np.float32), f"none ({reason})")


def fingerprints(pair: Pair) -> dict[str, str]:
    """What a calibration depends on: configurations and tensors' headers of both, and the confidence head's weights,
    which no two trainings share."""
    drafter = pair.drafter.fingerprint
    if pair.config.has_confidence_head:
        head = pair.drafter.read(_HEAD, pair.drafter.shapes[_HEAD]).numpy()
        drafter += "-" + hashlib.sha256(head.tobytes()).hexdigest()[:16]
    return {"drafter": drafter, "target": pair.target.fingerprint}


def load_calibration(setting: str, pair: Pair, weight_format: str) -> Calibration:
    """The calibration that `setting` names: a file, "auto" (the one beside the drafter, if there is one) or "none".

    Raises ConfigurationError naming the file, what it holds, what was expected and what to do.
    """
    block_size, path = pair.config.block_size, Path(setting).expanduser()
    if setting == "none":
        return uncalibrated(block_size, f"{SETTING} is none")
    if not pair.config.has_confidence_head:
        return uncalibrated(block_size, "the drafter has no confidence head")
    if setting == "auto":
        path = pair.drafter.directory / FILE_NAME
        if not path.exists():
            return uncalibrated(block_size, f"no {FILE_NAME} beside the drafter: fit one with dspark calibrate")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read ({error})") from None
    temperatures, shifts = parse_calibration(content, path, block_size, fingerprints(pair))
    formats = content.get("weight_formats") or {}
    if formats.get("drafter") != weight_format:
        log.warning("%s was fitted with %s weights, these are %s", path, formats.get("drafter"), weight_format)
    words = f"{path} (fitted with {formats.get('target', 'unknown')} target weights)"
    return Calibration(temperatures, shifts, words)


class _Terms(NamedTuple):
    temperatures: npt.NDArray[np.float32]
    shifts: npt.NDArray[np.float32]


def parse_calibration(content: Any, path: Path, block_size: int, expected: Mapping[str, str]) -> _Terms:
    """Both [highest regime + 1, block size], of a file's content. Raises ConfigurationError."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise _refused(path, f"is of format {found!r}, not {FORMAT}")
    if content.get("block_size") != block_size:
        raise _refused(path, f"is for blocks of {content.get('block_size')} drafts, the drafter's have {block_size}")
    fitted_for = content.get("fingerprints")
    for name, own in expected.items():
        found = fitted_for.get(name) if isinstance(fitted_for, dict) else None
        if found != own:
            raise _refused(path, f"was fitted for another {name}: {found} there, {own} here")
    temperatures = _table(content, "temperatures", path, block_size)
    if (temperatures[list(Regime)] <= 0).any():
        raise _refused(path, f"has a temperature of {temperatures[list(Regime)].min()}: all must be above 0")
    return _Terms(temperatures, _table(content, "shifts", path, block_size))


def _table(content: Mapping[str, Any], key: str, path: Path, block_size: int) -> npt.NDArray[np.float32]:
    """A number for each regime and position; 1 where there is no such regime."""
    rows, names = content.get(key), [regime.name.lower() for regime in Regime]
    if not isinstance(rows, dict) or sorted(rows) != sorted(names):
        given = sorted(rows) if isinstance(rows, dict) else rows
        raise _refused(path, f"has {key} for the regimes {given}, not {sorted(names)}")
    table = np.ones((max(Regime) + 1, block_size), np.float32)
    for regime in Regime:
        values = rows[regime.name.lower()]
        if not isinstance(values, list) or len(values) != block_size:
            raise _refused(path, f"has {regime.name.lower()} {key} {values}, not {block_size} of them")
        for value in values:
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise _refused(path, f"has {value!r} among its {regime.name.lower()} {key}, which is no number")
        table[regime] = values
    return table


def _refused(path: Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"calibration {path} {what}: fit it anew with dspark calibrate --out {path}, or set {SETTING} to none",
        field="calibration",
    )
