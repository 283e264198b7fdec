"""Fits the cost model to measured calls. Pure functions.

The step's terms are fitted together, as a non-negative least-squares problem of relative errors: θ is a sum of
non-negative increments at the measured sizes, so monotone by construction. δ is the isotonic regression of each block
length's times, then of the block lengths at each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from scheduler_service.cost_model import CostModel, Floats, extended


class StepPoint(NamedTuple):
    """Measured time of `Step` calls of one shape."""

    num_rows: int
    num_tokens: int
    num_context: float
    """Positions of context read, summed over the token rows."""
    ns: float


class DraftPoint(NamedTuple):
    """Measured time of `Draft` calls of one shape."""

    num_drafted: int
    block_len: int
    ns: float


def fit_costs(
    steps: Sequence[StepPoint],
    drafts: Sequence[DraftPoint],
    *,
    max_tokens: int,
    max_drafted: int,
    padded_rows: Sequence[int] = (),
) -> CostModel:
    """The model nearest to the points. Raises ValueError without a step point.

    `padded_rows`: rows a linear layer really runs for 1, 2, 3 … rows (beyond its end: as they are). Between two
    measured sizes θ is linear in the rows that really run, so it moves in the engine's own steps.
    """
    really_run = np.arange(max_tokens + 1, dtype=np.float64)
    known = padded_rows[:max_tokens]
    really_run[1 : len(known) + 1] = known
    really_run = np.maximum.accumulate(really_run)
    rows, context, times = (np.array([point[i] for point in steps], np.float64) for i in (0, 2, 3))
    run = really_run[[point.num_tokens for point in steps]]
    knots = np.unique(run)
    columns = np.column_stack([np.ones(times.size), rows, context, run[:, None] >= knots[None, 1:]])
    terms = non_negative_least_squares(columns / times[:, None], np.ones(times.size))
    theta = np.concatenate(([0.0], np.cumsum(terms[3:])))
    by_run = np.interp(np.arange(knots[-1] + 1), knots, theta)
    token_ns = np.array([extended(by_run, int(count), 0)[0] for count in really_run])
    bias_ns = max(float(terms[0]), 1.0)  # a step is never free, even if context explains all of its time
    return CostModel(bias_ns, float(terms[1]), float(terms[2]), token_ns, _fit_drafts(drafts, max_drafted))


def _fit_drafts(points: Sequence[DraftPoint], max_drafted: int) -> dict[int, Floats]:
    curves: list[Floats] = []
    block_lens = sorted({point.block_len for point in points})
    for block_len in block_lens:
        own = sorted((point.num_drafted, point.ns) for point in points if point.block_len == block_len)
        sizes = [size for size, _ in own]
        values = isotonic([ns for _, ns in own])
        measured = np.interp(np.arange(sizes[-1] + 1), sizes, values)
        curves.append(np.array([extended(measured, size, 0)[0] for size in range(max_drafted + 1)]))
    if not curves:
        return {}
    # Isotonic regression keeps order, so what is monotone by size stays so.
    together = np.apply_along_axis(isotonic, 0, np.array(curves))
    together[:, 0] = 0.0
    return dict(zip(block_lens, together, strict=True))


def isotonic(values: Sequence[float] | Floats) -> Floats:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators).

    Neighbours out of order share their mean, so one spike is diluted instead of lifting everything after it.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


def non_negative_least_squares(matrix: Floats, values: Floats) -> Floats:
    """x ≥ 0 that minimises ‖matrix·x − values‖; matrix [m, n] (active-set method of Lawson and Hanson).

    Columns are scaled to unit length, so tolerances do not depend on units.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = matrix / lengths
    num_terms = scaled.shape[1]
    x, is_free = np.zeros(num_terms), np.zeros(num_terms, bool)
    for _ in range(3 * num_terms):
        gradient = scaled.T @ (values - scaled @ x)
        gradient[is_free] = 0.0
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10 * np.linalg.norm(values):
            break
        is_free[entering] = True
        while is_free.any():
            solution = np.zeros(num_terms)
            solution[is_free] = np.linalg.lstsq(scaled[:, is_free], values, rcond=None)[0]
            if (solution[is_free] > 0).all():
                x = solution
                break
            # Go towards the solution until the first term reaches 0, which is then held there.
            blocked = np.flatnonzero(is_free & (solution <= 0))
            room = x[blocked] - solution[blocked]
            share = np.divide(x[blocked], room, out=np.zeros(blocked.size), where=room > 0)
            x = x + share.min() * (solution - x)
            is_free[blocked[share <= share.min()]] = False
            x[~is_free] = 0.0
    result: Floats = x / lengths
    return result


def relative_errors(model: CostModel, steps: Sequence[StepPoint], drafts: Sequence[DraftPoint]) -> Mapping[str, Floats]:
    """(predicted − measured) / measured of every point, for "step" and "draft"."""
    step = [model.plain_ns(point.num_rows, point.num_tokens, point.num_context) / point.ns - 1 for point in steps]
    draft = [model.draft_ns(point.num_drafted, point.block_len) / point.ns - 1 for point in drafts]
    return {"step": np.array(step), "draft": np.array(draft)}
