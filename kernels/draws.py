"""Single draws, compiled: what the target's and the drafter's kernels share.

Noise is that of `kernels.philox`, bit for bit, computed only where it is looked at.
"""

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
_COUPLED = np.uint64(Purpose.COUPLED)
_ZERO, _ONE, _UNUSED_BITS = np.uint64(0), np.uint64(1), np.uint64(11)


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
    return int(_coupled_index(weights, target_ids, np.uint64(key), np.uint64(position)))


def warm_up() -> None:
    """Compiles all that the kernels call, or loads it from numba's cache (seconds), so that no request waits for it."""
    uniform(0, Purpose.ACCEPT, 0, 0)
    weights = np.ones(1)
    for dtype in (np.float32, np.float64):
        inverse_cdf_index(weights.astype(dtype), 0.5)
    for target_ids in (None, np.zeros(1, np.uint32), np.zeros(1, np.int64)):
        coupled_index(weights, target_ids, 0, 0)


@njit(cache=True, nogil=True)
def _uniform(key: Any, purpose: Any, position: Any, round_: Any) -> float:
    return _to_uniform(_philox_block(_ZERO, position, round_, key, purpose)[0])


@njit(cache=True, nogil=True)
def _inverse_cdf_index(weights: Any, chance: float) -> int:
    # Blocks first: a running sum over a vocabulary is one long chain of dependent additions.
    num_blocks = (weights.size + _BLOCK - 1) // _BLOCK
    masses = np.empty(num_blocks)
    for block in range(num_blocks):
        masses[block] = _mass(weights, block * _BLOCK, min(weights.size, (block + 1) * _BLOCK))
    rest = chance * masses.sum()
    last_block = 0  # rounding may carry the walk past the end: the last positive weight is the answer then
    for block in range(num_blocks):
        if masses[block] > 0.0:
            last_block = block
            if rest < masses[block]:
                break
            rest -= masses[block]
    last_index = 0
    for index in range(last_block * _BLOCK, min(weights.size, (last_block + 1) * _BLOCK)):
        if weights[index] > 0.0:
            last_index = index
            if rest < weights[index]:
                break
            rest -= weights[index]
    return last_index


@njit(cache=True, nogil=True)
def _mass(weights: Any, start: int, stop: int) -> float:
    sum0, sum1, sum2, sum3 = 0.0, 0.0, 0.0, 0.0
    num_fours = (stop - start) // 4
    for four in range(num_fours):
        index = start + 4 * four
        sum0 += weights[index]
        sum1 += weights[index + 1]
        sum2 += weights[index + 2]
        sum3 += weights[index + 3]
    for index in range(start + 4 * num_fours, stop):
        sum0 += weights[index]
    return (sum0 + sum1) + (sum2 + sum3)


@njit(cache=True, nogil=True)
def _coupled_index(weights: Any, target_ids: Any, key: Any, position: Any) -> int:
    best_index, best = 0, math.inf
    block_in_hand = np.int64(-1)
    words = (_ZERO, _ZERO, _ZERO, _ZERO)
    for index in range(weights.size):
        target_id = np.int64(index) if target_ids is None else np.int64(target_ids[index])
        if target_id >> 2 != block_in_hand:
            block_in_hand = target_id >> 2
            words = _philox_block(np.uint64(block_in_hand), position, _ZERO, key, _COUPLED)
        draw = max(_to_uniform(words[target_id & 3]), 2.0**-54)
        limit = best * weights[index]
        if draw < limit:  # E >= draw: the logarithm is seldom needed
            exponential = -math.log1p(-draw)
            if exponential < limit:
                best_index, best = index, exponential / weights[index]
    return best_index


@njit(cache=True, nogil=True)
def _to_uniform(word: Any) -> float:
    return float(np.int64(word >> _UNUSED_BITS)) * 2.0**-53


@njit(cache=True, nogil=True)
def _philox_block(block: Any, position: Any, round_: Any, key: Any, purpose: Any) -> Any:
    """Four words of a stream: Philox4x64-10 (Salmon et al. 2011), counted as numpy counts."""
    c0, c1, c2, c3 = block + _ONE, position, round_, _ZERO
    k0, k1 = key, purpose
    for _ in range(10):
        high0, low0 = _high_product(_M0, c0), _M0 * c0
        high1, low1 = _high_product(_M1, c2), _M1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


def _emit_high_product(typing_context: Any, a: Any, b: Any) -> Any:
    """Upper 64 bits of a 64-bit product."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit


_high_product: Any = intrinsic(_emit_high_product)
