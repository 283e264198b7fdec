"""Single draws, compiled: what the target's and the drafter's kernels share.

Noise is that of `kernels.philox`, bit for bit, computed only where it is looked at.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.cpu.noise import BLOCK_IDS, best_coupled, draws_from, draws_of, first_uniform
from kernels.cpu.softmax import inverse_cdf
from kernels.philox import Purpose


def uniform(key: int, purpose: Purpose, position: int, round_: int) -> float:
    """The first uniform in [0, 1) of `kernels.philox.uniforms`."""
    return float(_uniform(np.uint64(key), np.uint64(purpose), np.uint64(position), np.uint64(round_)))


def inverse_cdf_index(weights: npt.NDArray[np.floating[Any]], chance: float) -> int:
    """First index whose running mass exceeds `chance` in [0, 1) of the total; float64 sums.

    weights [n] >= 0, C-contiguous, with a positive, finite sum. Never an index of weight 0.
    """
    return int(_inverse_cdf_index(weights, chance))


def coupled_index(
    weights: npt.NDArray[np.float64], target_ids: npt.NDArray[np.integer[Any]] | None, key: int, position: int
) -> int:
    """Index of the smallest E[target id] / weight, the first of equals, E as `kernels.philox.coupled_exponentials`.

    weights [n] >= 0, not all 0; target_ids [n], None for 0 ... n - 1.
    """
    ids = None if target_ids is None else np.ascontiguousarray(target_ids, np.uint32)
    return int(_coupled_index(weights, ids, np.uint64(key), np.uint64(position)))


def warm_up() -> None:
    """Compiles all that the kernels call, or loads it from numba's cache (seconds), so that no request waits for it."""
    uniform(0, Purpose.ACCEPT, 0, 0)
    weights = np.ones(1)
    for dtype in (np.float32, np.float64):
        inverse_cdf_index(weights.astype(dtype), 0.5)
    for target_ids in (None, np.zeros(1, np.uint32)):
        coupled_index(weights, target_ids, 0, 0)


@njit(cache=True, nogil=True)
def _uniform(key: Any, purpose: Any, position: Any, round_: Any) -> float:
    return float(first_uniform(key, purpose, position, round_))


@njit(cache=True, nogil=True)
def _inverse_cdf_index(weights: Any, chance: float) -> int:
    return int(inverse_cdf(weights, chance))


@njit(cache=True, nogil=True)
def _coupled_index(weights: Any, target_ids: Any, key: Any, position: Any) -> int:
    draws = np.empty(weights.size + BLOCK_IDS)
    if target_ids is None:
        draws_from(0, weights.size, key, position, draws)
    else:
        draws_of(target_ids, weights.size, key, position, draws)
    index, _ = best_coupled(weights, draws, weights.size, math.inf)
    return int(index)
