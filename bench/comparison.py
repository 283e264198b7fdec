"""Scheduled modes against the best of the others, measured by what equal servers differ by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.measure import GroupResult
from bench.modes import ModeSpec

_DRAWS = 2000
"""Groups drawn with replacement for an interval, so many times."""


class Ratio(NamedTuple):
    """Paired ratios of speed, group by group."""

    median: float
    p25: float
    p75: float
    low: float
    high: float
    """95 % interval of the median, by bootstrap over groups: the more there are, the smaller a difference it tells."""
    num_groups: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


class Verdict(NamedTuple):
    """One scheduled mode at one concurrency."""

    concurrency: int
    mode: str
    best: str
    """The other mode that is fastest by paired medians."""
    to_best: Ratio
    """Over that mode."""
    to_best_of_each: Ratio
    """Over whichever other mode was fastest in each group: below 1 by chance alone, the more modes there are."""
    noise: float | None
    """How far apart one mode is from itself: see `noise_of`. None if no mode ran again."""

    @property
    def is_within_noise(self) -> bool | None:
        """Whether the mode is not slower than the best by more than the noise; None without one."""
        return None if self.noise is None else self.to_best.median >= 1.0 - self.noise


def paired_ratio(own: Sequence[float], base: Sequence[float]) -> Ratio:
    """Median of the ratios of two equally long lists of speeds, quartiles, and the median's own interval."""
    ratios = np.array([mine / other for mine, other in zip(own, base, strict=True)])
    p25, median, p75 = (float(value) for value in np.percentile(ratios, [25, 50, 75]))
    drawn = np.random.default_rng(0).integers(ratios.size, size=(_DRAWS, ratios.size))
    low, high = (float(value) for value in np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5]))
    return Ratio(median, p25, p75, low, high, len(ratios))


def noise_of(control: Ratio) -> float:
    """How far a ratio that should be 1 may be from it by chance: the farther end of its interval."""
    return max(abs(control.low - 1.0), abs(control.high - 1.0))


def judge(results: Sequence[GroupResult], modes: Sequence[ModeSpec]) -> list[Verdict]:
    """Compares at each concurrency. `cap-accept`, which only measures, and second servers are no competitors."""
    scheduled = [
        spec.name for spec in modes if spec.is_scheduled and spec.verify_mode == "compact" and not spec.repeats
    ]
    others = [spec.name for spec in modes if not spec.is_scheduled and not spec.repeats]
    if not others:
        return []
    verdicts = []
    for concurrency in sorted({result.concurrency for result in results}):
        speeds = {
            spec.name: _speeds(results, spec.name, concurrency) for spec in modes if spec.verify_mode != "cap-accept"
        }
        to_first = {name: paired_ratio(speeds[name], speeds[others[0]]).median for name in others}
        best = max(others, key=lambda name: to_first[name])
        fastest = [max(group) for group in zip(*(speeds[name] for name in others), strict=True)]
        controls = [paired_ratio(speeds[spec.name], speeds[spec.repeats]) for spec in modes if spec.repeats in speeds]
        noise = max(map(noise_of, controls), default=None)
        verdicts += [
            Verdict(
                concurrency,
                name,
                best,
                paired_ratio(speeds[name], speeds[best]),
                paired_ratio(speeds[name], fastest),
                noise,
            )
            for name in scheduled
        ]
    return verdicts


def _speeds(results: Sequence[GroupResult], mode: str, concurrency: int) -> list[float]:
    """Tokens per second of each group, in their order."""
    return [each.tokens_per_second for each in results if (each.mode, each.concurrency) == (mode, concurrency)]
