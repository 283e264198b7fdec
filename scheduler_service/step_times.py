"""How long steps really take, against what a cost model predicts: plain ones are chained, drafted ones wait twice."""

from __future__ import annotations

import math

OUTLIER = 4.0
"""A step that takes so many times what was expected is counted as that: pauses are nobody's loss."""


class StepTimes:
    """Measured over predicted time, of plain steps and of drafted ones, as logarithms.

    Drafted steps alone cannot tell a machine that drifts from a draft pass that costs more than it should. So plain
    steps set the level, the first drafted steps the distance to it, and later ones are taken for drift for the larger
    part. An audit that finds another level leaves the drafted steps, which were measured just before, where they are.
    """

    def __init__(self) -> None:
        self._level = self._distance = 0.0
        self._num_plain = self._num_drafted = 0
        self.guessed = 0.0
        """How far drafted steps have moved the level since plain ones were measured, as a logarithm."""

    @property
    def plain(self) -> float:
        """Factor of plain steps."""
        return math.exp(self._level)

    @property
    def drafted(self) -> float:
        """Factor of drafted steps."""
        return math.exp(self._level + self._distance)

    def add_plain(self, measured_ns: float, predicted_ns: float, *, is_audit: bool) -> None:
        """A plain step that waited for nobody."""
        self._num_plain += 1
        error = _capped_error(measured_ns, predicted_ns * self.plain, self._num_plain)
        step = max(1 / self._num_plain, 0.25 if is_audit else 0.1) * error
        self._level += step
        self.guessed = 0.0
        self._distance -= step if is_audit else 0.0

    def add_drafted(self, measured_ns: float, predicted_ns: float) -> None:
        """A drafted step."""
        self._num_drafted += 1
        error = _capped_error(measured_ns, predicted_ns * self.drafted, self._num_drafted)
        if self._num_drafted <= 8:
            self._distance += error / self._num_drafted
        else:
            self._level += 0.06 * error
            self.guessed += 0.06 * error
            self._distance += 0.02 * error


def _capped_error(measured_ns: float, predicted_ns: float, count: int) -> float:
    """Logarithm of measured / predicted; the first ones may be far off, later ones are outliers then."""
    if measured_ns <= 0 or predicted_ns <= 0:
        return 0.0
    cap = math.log(OUTLIER) if count <= 4 else 0.4
    return max(-cap, min(cap, math.log(measured_ns / predicted_ns)))
