"""One draw from unnormalised weights: the two ways, shared by the target's and the drafter's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 256


def inverse_cdf_index(weights: npt.NDArray[np.floating[Any]], uniform: float) -> int:
    """First index whose running mass exceeds `uniform` in [0, 1) of the total; float64 sums.

    weights [n] >= 0 with a positive, finite sum. Never an index of weight 0.
    """
    # Sums of whole blocks first: a running sum over a vocabulary is a long chain of dependent additions.
    mass_through = np.cumsum(np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK), dtype=np.float64))
    rest = uniform * mass_through[-1]
    block = int(min(np.searchsorted(mass_through, rest, side="right"), np.searchsorted(mass_through, mass_through[-1])))
    rest -= mass_through[block - 1] if block else 0.0
    start = block * _BLOCK
    inside = weights[start : start + _BLOCK]
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), rest, side="right"))
    return start + int(min(index, np.flatnonzero(inside)[-1]))


def coupled_index(weights: npt.NDArray[np.float64], draws: npt.NDArray[np.float64]) -> int:
    """arg min E / weight, E = -log(1 - max(draw, 2^-54)) as in `kernels.philox.coupled_exponentials`.

    weights [n] >= 0, not all 0; draws [n], uniforms in [0, 1).
    """
    # E >= draw: the logarithm is needed only where draw / weight does not exceed the best E / weight found already.
    draws = np.maximum(draws, 2.0**-54)
    with np.errstate(divide="ignore"):
        bounds = draws / weights
    first = int(np.argmin(bounds))
    limit = -np.log1p(-draws[first]) / weights[first]
    candidates = np.flatnonzero(bounds <= limit * (1.0 + 1e-12))
    return int(candidates[np.argmin(-np.log1p(-draws[candidates]) / weights[candidates])])
