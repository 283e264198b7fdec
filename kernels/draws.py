"""One draw from unnormalised weights: the two ways, shared by the target's and the drafter's kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.philox import Purpose

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


def coupled_index(
    weights: npt.NDArray[np.float64], target_ids: npt.NDArray[np.integer[Any]] | None, key: int, position: int
) -> int:
    """Index of the smallest E[target id] / weight, the first of equals, E as `kernels.philox.coupled_exponentials`.

    weights [n] >= 0, not all 0; target_ids [n], None for 0 ... n - 1.
    """
    return int(_coupled_index(weights, target_ids, np.uint64(key), np.uint64(position)))


@njit(cache=True, nogil=True)
def _coupled_index(weights: Any, target_ids: Any, key: Any, position: Any) -> int:
    best_index, best = 0, math.inf
    block_in_hand = -1
    words = _philox_block(0, position, key)
    for index in range(weights.size):
        target_id = index if target_ids is None else np.int64(target_ids[index])
        if target_id >> 2 != block_in_hand:
            block_in_hand = target_id >> 2
            words = _philox_block(block_in_hand, position, key)
        word = words[target_id & 3]
        draw = max(np.int64(word >> np.uint64(11)) * 2.0**-53, 2.0**-54)
        if draw < best * weights[index]:  # E >= draw, so the logarithm is seldom needed
            exponential = -math.log1p(-draw)
            if exponential < best * weights[index]:
                best_index, best = index, exponential / weights[index]
    return best_index


@njit(cache=True, nogil=True)
def _philox_block(block: Any, position: Any, key: Any) -> Any:
    """Words 4 * block ... 4 * block + 3 of the coupled stream: Philox4x64-10 (Salmon et al. 2011), as numpy's."""
    c0, c1, c2, c3 = np.uint64(block) + np.uint64(1), position, np.uint64(0), np.uint64(0)
    k0, k1 = key, np.uint64(_PURPOSE)
    for _ in range(10):
        high0, low0 = _high_product(_M0, c0), _M0 * c0
        high1, low1 = _high_product(_M1, c2), _M1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


_PURPOSE = int(Purpose.COUPLED)
_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@intrinsic
def _high_product(typing_context: Any, a: Any, b: Any) -> Any:
    """Upper 64 bits of a 64-bit product."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit
