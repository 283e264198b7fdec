"""Full-width rounds: what a drafter claimed of each draft, and how many the target accepted.

Read from the JSON lines of `serve --trace FILE` (`scheduler_service/round_trace.py`). A round counts if its whole block
was verified whatever the confidences were; trimmed rounds say nothing about the drafts that were left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from service_kit.errors import ConfigurationError

Floats = npt.NDArray[np.float64]
_Row = tuple[Floats, int, int]
"""Logits, drafts accepted, request."""

_MAX_LOGIT = 30.0
"""Confidences of 0 and 1 have no logit."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of one regime, [N] each."""

    logits: Floats
    """[N, block size] of the conditional confidences; NaN where nothing was verified."""
    num_accepted: npt.NDArray[np.intp]
    requests: npt.NDArray[np.intp]
    """Which request each is from."""

    @property
    def block_size(self) -> int:
        """Drafts of a whole block."""
        return int(self.logits.shape[1])

    def __len__(self) -> int:
        return int(self.num_accepted.size)

    def of_requests(self, wanted: Iterable[int]) -> Rounds:
        """Those of some requests."""
        keep = np.isin(self.requests, np.fromiter(wanted, np.intp))
        return Rounds(self.logits[keep], self.num_accepted[keep], self.requests[keep])

    def at(self, position: int) -> Rounds:
        """Rounds that verified the draft at `position` (from 0), and what is known up to there."""
        keep = ~np.isnan(self.logits[:, position])
        return Rounds(self.logits[keep, : position + 1], self.num_accepted[keep], self.requests[keep])

    def num_reached(self, position: int) -> int:
        """Rounds in which every draft before `position` (from 0) was accepted and that one verified."""
        return int(np.count_nonzero(self.at(position).num_accepted >= position))


def read_rounds(trace: Path, block_size: int) -> dict[str, Rounds]:
    """Full-width rounds of a trace by regime ("greedy", "coupled", "rejection"), in the order they ran.

    Raises ConfigurationError for a file that is no trace.
    """
    found: dict[str, list[_Row]] = {}
    for number, line in enumerate(_lines(trace), 1):
        for regime, row in _rows(line, f"{trace}:{number}"):
            found.setdefault(regime, []).append(row)
    return {regime: _rounds(rows, block_size) for regime, rows in found.items()}


def _rows(line: str, place: str) -> list[tuple[str, _Row]]:
    """Full-width rounds of a step, with their regimes."""
    try:
        given = [(each["regime"], _logits(each), each) for each in json.loads(line)["rounds"]]
        return [
            (str(regime), (logits, int(each["num_accepted"]), int(each["request"])))
            for regime, logits, each in given
            if logits.size
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{place} is no line of a trace ({error!r})") from None


def _lines(trace: Path) -> Iterator[str]:
    try:
        with trace.open(encoding="utf-8") as file:
            yield from file
    except OSError as error:
        raise ConfigurationError(f"cannot read {trace}: {error.strerror}") from error


def _logits(row: dict[str, Any]) -> Floats:
    """Of a full-width round, up to the first confidence that is none; empty for other rounds."""
    confidences = row["confidences"]
    num_valid = next((k for k, confidence in enumerate(confidences) if confidence is None), len(confidences))
    if row["verify_len"] < num_valid:
        return np.empty(0)
    given = np.asarray(confidences[:num_valid], np.float64)
    with np.errstate(divide="ignore"):
        logits: Floats = np.clip(np.log(given) - np.log1p(-given), -_MAX_LOGIT, _MAX_LOGIT)
    return logits


def _rounds(rows: Sequence[_Row], block_size: int) -> Rounds:
    logits = np.full((len(rows), block_size), np.nan)
    for index, (own, _, _) in enumerate(rows):
        logits[index, : own.size] = own[:block_size]
    accepted = np.array([accepted for _, accepted, _ in rows], np.intp)
    return Rounds(logits, accepted, np.array([request for _, _, request in rows], np.intp))
