"""The truth: one row at a time, fully sorted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.sampling import Regime, SlotSampling
from kernels.target_probs import InvalidRowError


def target_probs(logits: npt.NDArray[np.float32], sampling: SlotSampling) -> npt.NDArray[np.float64]:
    """Filtered target distributions, [n, V]. Raises InvalidRowError (see the package)."""
    return np.stack([_row_probs(row, sampling) for row in logits])


def _row_probs(logits: npt.NDArray[np.float32], sampling: SlotSampling) -> npt.NDArray[np.float64]:
    ranking = np.argsort(-logits, kind="stable")
    best = logits[ranking[0]]
    if np.isnan(logits).any() or not np.isfinite(best):
        raise InvalidRowError("target logits hold NaN or +inf, or no finite value")
    if sampling.regime == Regime.GREEDY:
        weights = np.zeros(logits.size)
        weights[0] = 1.0
    else:
        weights = np.exp((logits[ranking].astype(np.float64) - best) / sampling.temperature)
    if sampling.top_k > 0:
        weights[sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        mass_through = np.cumsum(weights)
        is_reached_before = mass_through[:-1] >= sampling.top_p * mass_through[-1]
        weights[1:][is_reached_before] = 0.0
    weights[1:][weights[1:] < sampling.min_p * weights[0]] = 0.0
    probs = np.empty_like(weights)
    probs[ranking] = weights / weights.sum()
    return probs
