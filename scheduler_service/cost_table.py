"""What a step costs: T = δ(drafted rows) + θ(token rows), measured, in nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class CostTable:
    """Dense tables over row counts, both monotone: a noisy measurement cannot make more work look cheaper."""

    step_ns: npt.NDArray[np.float64]
    """[max tokens + 1] θ: a `Step` call by token rows as they are asked for; padding is already in it."""
    draft_ns: npt.NDArray[np.float64]
    """[max drafted rows + 1] δ: a `Draft` call by drafted rows; 0 for none."""

    @classmethod
    def from_measurements(
        cls,
        step_points: Mapping[int, float],
        draft_points: Mapping[int, float],
        *,
        max_tokens: int,
        max_drafted: int,
        padded_rows: Sequence[int] = (),
    ) -> CostTable:
        """Interpolates measured points, and extends them by their last slope.

        `padded_rows`: rows a linear layer really runs for 1, 2, 3 … rows (beyond its end: as they are). Token rows are
        counted as they really run, so between two measured points the cost moves in the engine's own steps.
        """
        really_run = np.arange(max_tokens + 1, dtype=np.float64)
        known = padded_rows[:max_tokens]
        really_run[1 : len(known) + 1] = known
        points = {float(really_run[tokens]): ns for tokens, ns in step_points.items()}
        step_ns = _interpolate(points, really_run)
        step_ns[0] = 0.0
        draft_ns = _interpolate(
            {float(rows): ns for rows, ns in draft_points.items()}, np.arange(max_drafted + 1, dtype=np.float64)
        )
        draft_ns[0] = 0.0
        return cls(step_ns, draft_ns)

    def total_ns(self, num_tokens: int, num_candidates: int, num_drafted: int) -> npt.NDArray[np.float64]:
        """Cost of a whole step at num_tokens + 0, 1 … num_candidates token rows; [num_candidates + 1]."""
        theta = self.step_ns[num_tokens : num_tokens + num_candidates + 1]
        total: npt.NDArray[np.float64] = theta + self.draft_ns[num_drafted]
        return total

    def __str__(self) -> str:
        """A few points of both tables, in milliseconds."""
        return "; ".join(
            f"{name} ms by {unit} " + ", ".join(f"{n}: {table[n] / 1e6:.2f}" for n in _shown(len(table)))
            for name, unit, table in (("step", "token rows", self.step_ns), ("draft", "drafted rows", self.draft_ns))
        )


def _shown(size: int) -> list[int]:
    return [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if n < size]


def _interpolate(points: Mapping[float, float], at: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Monotone piecewise linear values at `at`; beyond the last point with its last slope."""
    known = np.array(sorted(points))
    values = _monotone([points[key] for key in sorted(points)])
    result = np.interp(at, known, values)
    if known.size > 1:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        result = np.where(at > known[-1], values[-1] + slope * (at - known[-1]), result)
    return result


def _monotone(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators).

    Neighbours out of order share their mean, so one spike is diluted instead of lifting everything after it.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])
