"""Temperatures and shifts that turn a confidence head's logits into probabilities, one position after the other.

`fit_temperatures` is the published sequential temperature scaling (DSpark, arXiv 2607.05147): for k = 1 … block size,
T_k minimises the ECE of the survival Π σ(logit_i / T_i), i ≤ k, against "the first k drafts are all accepted", with
T_1 … T_{k-1} as found before. A temperature alone pulls confidences towards one half or away from it; it cannot help
where a head is over-confident throughout, say 0.54 on average where 0.37 are accepted.

`fit_terms` adds a shift and fits both by the likelihood of what happened at a position to the rounds that reached it,
which is smooth where ECE is not: on prompts that were not fitted it comes out better at every position that matters.
Neither changes the order of drafts within a position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from training.calibration_error import Terms, reliability
from training.rounds import Floats, Rounds

MIN_REACHED = 200
"""Rounds that must reach a position for a temperature of its own; else it gets that of the position before."""
GRID = np.geomspace(0.2, 10.0, 118)
"""Candidate temperatures, 3.4 % apart."""
_PRIOR_ROUNDS = 50
"""Weight of "as at the position before" in `fit_terms`: late positions are reached by few rounds."""
_SLOPES = (0.1, 5.0)
"""Bounds of 1 / temperature."""


def fit_temperatures(rounds: Rounds) -> Terms:
    """Published scaling: temperatures alone, shifts 0."""
    size, temperatures = rounds.block_size, list[float]()
    for position in range(size):
        if rounds.num_reached(position) < MIN_REACHED:
            temperatures.append(temperatures[-1] if temperatures else 1.0)
            continue
        known = rounds.at(position)
        before = Terms(temperatures, [0.0] * position).confidences(known.logits[:, :position]).prod(axis=1)
        own, is_true = known.logits[:, -1:], known.num_accepted > position
        errors = [reliability(before * Terms([float(t)], [0.0]).confidences(own)[:, 0], is_true).error for t in GRID]
        temperatures.append(round(float(GRID[int(np.argmin(errors))]), 4))
    return Terms(temperatures, [0.0] * size)


def fit_terms(rounds: Rounds) -> Terms:
    """Temperatures and shifts by likelihood. A position that few rounds reach stays near the one before."""
    terms, slope, shift = Terms([], []), 1.0, 0.0
    for position in range(rounds.block_size):
        known = rounds.at(position)
        has_reached = known.num_accepted >= position
        if has_reached.any():
            is_accepted = known.num_accepted[has_reached] > position
            slope, shift = _logistic(known.logits[has_reached, -1], is_accepted, slope, shift)
        terms.temperatures.append(round(1 / slope, 4))
        terms.shifts.append(round(shift, 4))
    return terms


def _logistic(logits: Floats, is_accepted: npt.NDArray[np.bool_], slope: float, shift: float) -> tuple[float, float]:
    """Slope and shift of greatest likelihood by Newton steps, drawn to those given as by `_PRIOR_ROUNDS` even bets."""
    columns = np.column_stack((logits, np.ones(logits.size)))
    weights = _PRIOR_ROUNDS / 4 * np.array([max(float(logits.var()), 1.0), 1.0])
    prior = np.array([slope, shift])
    found = prior.copy()
    for _ in range(50):
        expected = np.exp(-np.logaddexp(0.0, -columns @ found))
        gradient = columns.T @ (is_accepted - expected) - weights * (found - prior)
        curvature = (columns.T * (expected * (1 - expected))) @ columns + np.diag(weights)
        step = np.linalg.solve(curvature, gradient)
        found += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-9:
            break
    return float(np.clip(found[0], *_SLOPES)), float(found[1])
