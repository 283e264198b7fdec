"""The noise of `kernels.philox` on the device: the same Philox4x64-10 counters and words, bit for bit.

Uniforms are numpy's own (53 bits, float64). Exponentials are float32 of the same words: within 1e-6 of
`kernels.philox.coupled_exponentials`, relatively, for small ones too, which are those that win.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.philox import Purpose

COUPLED = tl.constexpr(int(Purpose.COUPLED))
_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_KEY_STEP_0 = tl.constexpr(0x9E3779B97F4A7C15)
_KEY_STEP_1 = tl.constexpr(0xBB67AE8584CAA73B)
_BITS = tl.constexpr(11)
"""Low bits of a word that a uniform leaves out."""
_UNIT = tl.constexpr(2.0**-53)
_LEAST_DRAW = tl.constexpr(2.0**-54)
_LAST_DRAW = tl.constexpr(2**53 - 1)


@triton.jit
def philox_words(c0, c1, c2, c3, key0, key1):
    """Four words of Philox4x64-10 (Salmon et al. 2011) for counters and keys, uint64, of one shape."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, _MULTIPLIER_0), c0 * _MULTIPLIER_0
        high1, low1 = tl.umulhi(c2, _MULTIPLIER_1), c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += _KEY_STEP_0
        key1 += _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def stream_words(block, key, purpose, position, round_):
    """Words 4 * block ... of streams; all uint64 of one shape, `block` from 0. numpy counts before it draws."""
    return philox_words(block + 1, position, round_, block ^ block, key, purpose)


@triton.jit
def first_uniform(key, PURPOSE: tl.constexpr, position, round_):
    """The first uniform in [0, 1) of `kernels.philox.uniforms`, float64; int64 arguments."""
    zero = key.to(tl.uint64, bitcast=True) ^ key.to(tl.uint64, bitcast=True)
    word, _, _, _ = stream_words(
        zero,
        key.to(tl.uint64, bitcast=True),
        zero + PURPOSE,
        position.to(tl.uint64, bitcast=True),
        round_.to(tl.uint64, bitcast=True),
    )
    return (word >> _BITS).to(tl.float64) * _UNIT


@triton.jit
def coupled_words_from(first_id, key, position, NUM_IDS: tl.constexpr):
    """Words [NUM_IDS] of consecutive target ids from `first_id`, a multiple of 4, on; key and position int64."""
    zeros = tl.zeros([NUM_IDS // 4], tl.uint64)
    blocks = zeros + (first_id // 4).to(tl.uint64) + tl.arange(0, NUM_IDS // 4).to(tl.uint64)
    keys, positions = zeros + key.to(tl.uint64, bitcast=True), zeros + position.to(tl.uint64, bitcast=True)
    word0, word1, word2, word3 = stream_words(blocks, keys, zeros + COUPLED, positions, zeros)
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def coupled_words_of(target_ids, key, position):
    """Words of target ids [n], each its own among the four of its block; key and position int64."""
    ids = target_ids.to(tl.uint64)
    zeros = ids ^ ids
    keys, positions = zeros + key.to(tl.uint64, bitcast=True), zeros + position.to(tl.uint64, bitcast=True)
    word0, word1, word2, word3 = stream_words(ids >> 2, keys, zeros + COUPLED, positions, zeros)
    early, late = tl.where((ids & 1) != 0, word1, word0), tl.where((ids & 1) != 0, word3, word2)
    return tl.where((ids & 2) != 0, late, early)


@triton.jit
def unit_exponential(word):
    """E = -log(1 - draw), float32, of a word's draw; a draw of 0 counts as 2^-54."""
    numerator = word >> _BITS
    draw = tl.maximum(numerator.to(tl.float32) * _UNIT, _LEAST_DRAW)
    # Small draws by 2 artanh(s): the logarithm of a number beside 1 has no accuracy to give.
    s = draw / (2.0 - draw)
    q = s * s
    series = 1.0 / 13 + q * (1.0 / 15)
    series = 1.0 / 9 + q * (1.0 / 11 + q * series)
    series = 1.0 / 5 + q * (1.0 / 7 + q * series)
    series = 2.0 * s * (1.0 + q * (1.0 / 3 + q * series))
    rest = ((numerator ^ _LAST_DRAW) + 1).to(tl.float32) * _UNIT
    return tl.where(draw < 0.5, series, -tl.log(rest))
