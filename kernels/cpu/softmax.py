"""Parts of a softmax over one row of logits: what a vocabulary cut into chunks is computed by, in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.cpu.jit import compiled, intrinsic, ir, types

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # the high part times k is exact
_ROUNDER = 1.5 * 2.0**52
"""Added to a float64 it leaves the nearest integer in the low bits."""
_ROUNDER_BITS = int(np.float64(_ROUNDER).view(np.int64))
_TAYLOR = tuple(1.0 / math.factorial(power) for power in range(13, -1, -1))
_BLOCK = 256
"""Weights whose sum is one link in the chain of an inverse-CDF walk."""
_LOWEST = -746.0
"""exp of it rounds to 0."""


@intrinsic
def _bits(typing_context: Any, value: Any) -> Any:
    return types.int64(types.float64), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(64)
    )


@intrinsic
def _from_bits(typing_context: Any, bits: Any) -> Any:
    return types.float64(types.int64), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.DoubleType()
    )


@compiled
def _exp(x: float) -> float:
    """exp of x <= 0 within 2 units in the last place, without a branch, so that loops over it become vectors."""
    x = x if x > _LOWEST else _LOWEST
    rounded = x * _LOG2_E + _ROUNDER
    power = _bits(rounded) - _ROUNDER_BITS
    whole = rounded - _ROUNDER
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    (t13, t12, t11, t10, t9, t8, t7, t6, t5, t4, t3, t2, t1, t0) = _TAYLOR
    low = (((((t13 * rest + t12) * rest + t11) * rest + t10) * rest + t9) * rest + t8) * rest + t7
    result = ((((((low * rest + t6) * rest + t5) * rest + t4) * rest + t3) * rest + t2) * rest + t1) * rest + t0
    half = power >> 1  # two factors, so that numbers below the smallest normal one come out rounded once
    return float(result * _from_bits((half + 1023) << 52) * _from_bits((power - half + 1023) << 52))


@compiled
def largest(logits: Any, start: int, stop: int) -> tuple[int, float]:
    """First index of the largest logit among start … stop - 1, and that logit; NaN if there is a NaN."""
    best_index, best = start, logits[start]
    for index in range(start, stop):
        if not (logits[index] <= best):
            if logits[index] != logits[index]:
                return index, logits[index]
            best_index, best = index, logits[index]
    return best_index, best


@compiled
def weigh(logits: Any, start: int, stop: int, best: float, temperature: float, weights: Any) -> None:
    """weights[i] = exp((logits[i] - best) / temperature) for i = start … stop - 1."""
    scale = 1.0 / temperature
    for index in range(start, stop):
        weights[index] = _exp((np.float64(logits[index]) - best) * scale)


@compiled
def mass(weights: Any, start: int, stop: int) -> float:
    """Sum of weights start … stop - 1 in float64, in an order of their places alone."""
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


@compiled
def inverse_cdf(weights: Any, chance: float) -> int:
    """First index whose running mass exceeds `chance` of the total; never one of weight 0."""
    # Blocks first: a running sum over a vocabulary is one long chain of dependent additions.
    size = weights.size
    total = 0.0
    for start in range(0, size, _BLOCK):
        total += mass(weights, start, min(size, start + _BLOCK))
    rest = chance * total
    last_start = 0  # rounding may carry the walk past the end: the last positive weight is the answer then
    for start in range(0, size, _BLOCK):
        block_mass = mass(weights, start, min(size, start + _BLOCK))
        if block_mass > 0.0:
            last_start = start
            if rest < block_mass:
                break
            rest -= block_mass
    last_index = 0
    for index in range(last_start, min(size, last_start + _BLOCK)):
        if weights[index] > 0.0:
            last_index = index
            if rest < weights[index]:
                break
            rest -= weights[index]
    return last_index
