"""Noise of `kernels.philox`, bit for bit: single draws, and draws of many target ids in vectors of eight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.cpu.jit import compiled, intrinsic, ir, types
from kernels.philox import Purpose

_COUPLED = int(Purpose.COUPLED)
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LANES = 8
BLOCK_IDS = 4 * _LANES
"""Consecutive target ids whose draws are computed at once."""
_WORD = ir.IntType(64)
_WORDS = ir.VectorType(_WORD, _LANES)


def _constant(value: int, kind: Any) -> Any:
    return ir.Constant(kind, [value] * _LANES if kind == _WORDS else value)


def _splat(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES))


def _wide_product(builder: Any, a: Any, factor: int) -> tuple[Any, Any]:
    """Upper and lower words of products, made of products of halves: vector units have no others."""
    half, half_bits = _constant(2**32 - 1, a.type), _constant(32, a.type)
    a_low, a_high = builder.and_(a, half), builder.lshr(a, half_bits)
    b_low, b_high = _constant(factor & 0xFFFFFFFF, a.type), _constant(factor >> 32, a.type)
    low = builder.mul(a_low, b_low)
    middle = builder.add(builder.mul(a_high, b_low), builder.lshr(low, half_bits))
    other = builder.add(builder.mul(a_low, b_high), builder.and_(middle, half))
    high = builder.add(builder.mul(a_high, b_high), builder.lshr(middle, half_bits))
    return builder.add(high, builder.lshr(other, half_bits)), builder.mul(a, _constant(factor, a.type))


def _philox(builder: Any, block: Any, position: Any, round_: Any, key: Any, purpose: Any) -> list[Any]:
    """Four words of streams, vectors or scalars: Philox4x64-10 (Salmon et al. 2011), counted as numpy counts."""
    kind = block.type
    counter = [builder.add(block, _constant(1, kind)), position, round_, _constant(0, kind)]
    keys = [key, purpose]
    for _ in range(10):
        high0, low0 = _wide_product(builder, counter[0], _MULTIPLIERS[0])
        high1, low1 = _wide_product(builder, counter[2], _MULTIPLIERS[1])
        counter = [
            builder.xor(builder.xor(high1, counter[1]), keys[0]),
            low1,
            builder.xor(builder.xor(high0, counter[3]), keys[1]),
            low0,
        ]
        keys = [builder.add(one, _constant(step, kind)) for one, step in zip(keys, _KEY_STEPS, strict=True)]
    return counter


def _coupled_words(builder: Any, blocks: Any, key: Any, position: Any) -> list[Any]:
    kind = blocks.type
    return _philox(builder, blocks, position, _constant(0, kind), key, _constant(_COUPLED, kind))


def _uniform(builder: Any, words: Any) -> Any:
    """53 bits of each word as a float64 in [0, 1)."""
    vector = words.type != _WORD
    count = words.type.count if vector else 1
    kind: Any = ir.VectorType(ir.DoubleType(), count) if vector else ir.DoubleType()
    shift, scale = ([11] * count, [2.0**-53] * count) if vector else (11, 2.0**-53)
    return builder.fmul(
        builder.sitofp(builder.lshr(words, ir.Constant(words.type, shift)), kind), ir.Constant(kind, scale)
    )


@intrinsic
def _first_uniform(typing_context: Any, key: Any, purpose: Any, position: Any, round_: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        key, purpose, position, round_ = args
        return _uniform(builder, _philox(builder, _constant(0, _WORD), position, round_, key, purpose)[0])

    return types.float64(*[types.uint64] * 4), emit


@intrinsic
def _draw_of(typing_context: Any, target_id: Any, key: Any, position: Any) -> Any:
    """The draw of one target id."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target_id, key, position = args
        words = _coupled_words(builder, builder.lshr(target_id, _constant(2, _WORD)), key, position)
        return _uniform(builder, _word_of(builder, words, target_id))

    return types.float64(*[types.uint64] * 3), emit


def _word_of(builder: Any, words: list[Any], target_ids: Any) -> Any:
    """Each target id's own among the four words of its block."""
    one, two, zero = (_constant(value, target_ids.type) for value in (1, 2, 0))
    is_odd = builder.icmp_unsigned("!=", builder.and_(target_ids, one), zero)
    is_late = builder.icmp_unsigned("!=", builder.and_(target_ids, two), zero)
    early, late = builder.select(is_odd, words[1], words[0]), builder.select(is_odd, words[3], words[2])
    return builder.select(is_late, late, early)


@intrinsic
def _store_draws_of(typing_context: Any, target_ids: Any, key: Any, position: Any, draws: Any) -> Any:
    """Draws of eight target ids, uint32 at an address, to an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, key, position, target = args
        kind = ir.VectorType(ir.IntType(32), _LANES)
        ids = builder.zext(builder.load(builder.inttoptr(source, kind.as_pointer()), align=4), _WORDS)
        blocks = builder.lshr(ids, _constant(2, _WORDS))
        words = _coupled_words(builder, blocks, _splat(builder, key), _splat(builder, position))
        uniforms = _uniform(builder, _word_of(builder, words, ids))
        builder.store(uniforms, builder.inttoptr(target, uniforms.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64, types.uint64, types.int64), emit


@intrinsic
def _store_draws_from(typing_context: Any, first_id: Any, key: Any, position: Any, draws: Any) -> Any:
    """Draws of BLOCK_IDS consecutive target ids from a multiple of 4 on, to an address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first_id, key, position, target = args
        first = _splat(builder, builder.lshr(first_id, _constant(2, _WORD)))
        blocks = builder.add(first, ir.Constant(_WORDS, list(range(_LANES))))
        words = _coupled_words(builder, blocks, _splat(builder, key), _splat(builder, position))

        def shuffle(a: Any, b: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

        pairs = [lane + side * _LANES for lane in range(_LANES) for side in range(2)]
        first_pairs, last_pairs = shuffle(words[0], words[1], pairs), shuffle(words[2], words[3], pairs)
        fours = [
            2 * lane + half + side * 2 * _LANES for lane in range(_LANES) for side in range(2) for half in range(2)
        ]
        uniforms = _uniform(builder, shuffle(first_pairs, last_pairs, fours))
        builder.store(uniforms, builder.inttoptr(target, uniforms.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64, types.int64), emit


@compiled
def first_uniform(key: Any, purpose: Any, position: Any, round_: Any) -> float:
    """The first uniform in [0, 1) of a stream; uint64 arguments."""
    return float(_first_uniform(key, purpose, position, round_))


@compiled
def _to_exponential(draw: float) -> float:
    return float(-math.log1p(-max(draw, 2.0**-54)))


@compiled
def coupled_exponential(target_id: int, key: Any, position: Any) -> float:
    """E[target id] of a seeded position; key and position uint64."""
    return float(_to_exponential(_draw_of(np.uint64(target_id), key, position)))


@compiled
def draws_of(target_ids: Any, count: int, key: Any, position: Any, draws: Any) -> None:
    """draws[i], the uniform behind E of target_ids[i], uint32, for i below `count`; key and position uint64."""
    source, target = target_ids.ctypes.data, draws.ctypes.data
    for index in range(0, count - _LANES + 1, _LANES):
        _store_draws_of(source + 4 * index, key, position, target + 8 * index)
    for index in range(count // _LANES * _LANES, count):
        draws[index] = _draw_of(np.uint64(target_ids[index]), key, position)


@compiled
def draws_from(first_id: int, count: int, key: Any, position: Any, draws: Any) -> None:
    """draws[i], the uniform behind E of first_id + i for i below `count`; first_id is a multiple of 4.

    draws has room for `count` rounded up to a multiple of BLOCK_IDS.
    """
    target = draws.ctypes.data
    for index in range(0, count, BLOCK_IDS):
        _store_draws_from(np.uint64(first_id + index), key, position, target + 8 * index)


@compiled
def best_coupled(weights: Any, draws: Any, count: int, bound: float) -> tuple[int, float]:
    """Index and value of the smallest E / weight, the first of equals, if it is below `bound`; else -1.

    weights [count] >= 0; draws [count] of `draws_of` or `draws_from`.
    """
    best_index, best = -1, bound
    for index in range(count):
        limit = best * weights[index]
        # E >= draw: the logarithm is seldom needed. A draw of 0 counts as 2^-54.
        if draws[index] < limit:
            exponential = _to_exponential(draws[index])
            if exponential < limit:
                best_index, best = index, exponential / weights[index]
    return best_index, best
