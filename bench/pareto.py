"""Throughput at the same speed for each user, and speed for each user at the same throughput, from measured curves.

A curve has one point for each concurrency. Between neighbouring points it is taken to be straight; beyond its ends
nothing is known, so nothing is claimed there.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple


class Point(NamedTuple):
    """What one concurrency gives, in tokens per second."""

    user_speed: float
    """Of a request, after its first token."""
    throughput: float
    """Of all requests together."""


class Missing(Enum):
    """Why there is no ratio."""

    CANNOT = "baseline cannot"
    """It is faster than anything that the baseline was seen to do."""
    UNMEASURED = "not measured"
    """It lies below the slow end of the baseline's curve."""


class Gains(NamedTuple):
    """Of one point over the baseline's curve, as ratios."""

    throughput: float | Missing
    """At equal speed for each user."""
    user_speed: float | Missing
    """At equal throughput."""


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both, fastest for a user first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.user_speed, -each.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best


def gains(own: Point, baseline: Sequence[Point]) -> Gains:
    """How much more `own` gives than the curve of `baseline`, which needs at least one point."""
    best = frontier(baseline)
    by_speed = [(point.user_speed, point.throughput) for point in best]
    by_throughput = [(point.throughput, point.user_speed) for point in best]
    return Gains(
        _ratio(own.throughput, _value_at(own.user_speed, by_speed)),
        _ratio(own.user_speed, _value_at(own.throughput, by_throughput)),
    )


def _ratio(value: float, reference: float | Missing) -> float | Missing:
    return reference if isinstance(reference, Missing) else value / reference


def _value_at(x: float, curve: Sequence[tuple[float, float]]) -> float | Missing:
    """The curve's second coordinate where its first is `x`."""
    ordered = sorted(curve)
    if x > ordered[-1][0]:
        return Missing.CANNOT
    if x < ordered[0][0]:
        return Missing.UNMEASURED
    for (left, low), (right, high) in pairwise(ordered):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return ordered[0][1]  # a single point, met exactly
