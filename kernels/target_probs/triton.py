"""Filters found without a sort: the last token that a filter keeps is searched digit by digit over the bits of logits.

A row's summary says what is left of its distribution: a prefix of the ranking, given by its last logit and, among
equals of that, its last id; a floor for weights (min-p); the mass that is left. Whoever needs a probability computes it
from that: `exp((logit - best) / temperature) / mass`, float32 over float64.

Equality with the reference: greedy and kept sets are the same unless a token lies within rounding (1e-6, relatively) of
what top-p or min-p ask for; probabilities agree within 1e-5 of their size, plus 1e-7 for each unit of
(best - logit) / temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import SlotSampling
from kernels.target_probs import InvalidRowError
from kernels.triton.rows import SamplingRows
from kernels.triton.tiles import BLOCK_VOCAB, GREEDY, TileStats, is_kept, join_stats, tile_stats, weights_of

_BLOCK_SEARCH = 1024
"""Tokens that a search looks at at once."""
_NUM_DIGITS = tl.constexpr(16)
_ALL_IDS = tl.constexpr(2**31 - 1)


class RowSummaries(NamedTuple):
    """What is left of each row's distribution, [M]; undefined for rows of nobody."""

    best: Tensor
    """float32 logit."""
    best_ids: Tensor
    """int32"""
    masses: Tensor
    """float64: weights kept, that of the best token being 1."""
    thresholds: Tensor
    """float32: logits above are kept."""
    last_ids: Tensor
    """int32: of logits equal to the threshold, ids up to this one."""
    floors: Tensor
    """float32: smaller weights are not kept."""
    is_valid: Tensor
    """int32: 0 for NaN, +inf or no finite logit."""


@triton.jit
def _ordered(logits):
    """uint32 in the order of float32 logits; -0 and 0 are one."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _logit_of(key):
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(row_ptr, vocab_size, best, temperature, wanted, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Threshold and last id of the shortest prefix of the ranking that holds `wanted`, float64: tokens or mass."""
    digits = tl.arange(0, _NUM_DIGITS)
    prefix, decided = tl.zeros([], tl.uint32), tl.zeros([], tl.uint32)
    above = tl.zeros([], tl.float64)
    for step in range(8):
        shift = 28 - 4 * step
        bins = tl.zeros([_NUM_DIGITS], tl.float64)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
            keys = _ordered(logits)
            is_member = (ids < vocab_size) & ((keys & decided) == prefix)
            if IS_MASS:
                counted = tl.where(is_member, weights_of(logits, best, temperature), 0.0)
            else:
                counted = tl.where(is_member, 1.0, 0.0)
            own = ((keys >> shift) & 15).to(tl.int32)
            is_own = own[:, None] == digits[None, :]
            bins += tl.sum(tl.where(is_own, counted[:, None], 0.0).to(tl.float64), 0)
        higher = tl.sum(tl.where(digits[None, :] > digits[:, None], bins[None, :], 0.0), 1)
        # Rounding may leave a little of the mass wanted after the last bin: that one then.
        lowest = tl.min(tl.where(bins > 0.0, digits, 15), 0)
        reached = tl.max(tl.where((bins > 0.0) & (above + higher + bins >= wanted), digits, -1), 0)
        digit = tl.where(reached < 0, lowest, reached)
        above += tl.sum(tl.where(digits == digit, higher, 0.0), 0)
        prefix |= digit.to(tl.uint32) << shift
        decided |= tl.full([], 15, tl.uint32) << shift
    threshold = _logit_of(prefix)
    each = 1.0
    if IS_MASS:
        each = weights_of(threshold, best, temperature)
    ties = tl.maximum(tl.ceil((wanted - above) / tl.where(each > 0.0, each, 1.0)), 1.0)
    return threshold, _id_of_tie(row_ptr, vocab_size, threshold, ties, BLOCK)


@triton.jit
def _id_of_tie(row_ptr, vocab_size, threshold, wanted, BLOCK: tl.constexpr):
    """Id of the `wanted`-th token, by id, whose logit is `threshold`; all ids where there are not as many."""
    found = tl.full([], _ALL_IDS, tl.int32)
    count = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_equal = (ids < vocab_size) & (logits == threshold)
        through = count + tl.cumsum(is_equal.to(tl.int32), 0)
        is_wanted = is_equal & (through.to(tl.float64) == wanted)
        found = tl.minimum(found, tl.min(tl.where(is_wanted, ids, _ALL_IDS), 0))
        count += tl.sum(is_equal.to(tl.int32), 0)
    return found


@triton.jit
def _kept_mass(row_ptr, vocab_size, best, temperature, threshold, last_id, floor, BLOCK: tl.constexpr):
    mass = tl.zeros([], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
        kept = is_kept(logits, ids, threshold, last_id, floor, best, temperature)
        mass += tl.sum(tl.where(kept, weights_of(logits, best, temperature), 0.0).to(tl.float64), 0)
    return mass


@triton.jit
def row_summary_kernel(
    logits_ptr, logits_stride, request_of_row_ptr,
    regimes_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    tile_best_ptr, tile_ids_ptr, tile_masses_ptr, tile_bad_ptr,
    best_ptr, best_ids_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, is_valid_ptr,
    vocab_size, num_tiles, MAX_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`RowSummaries` of row `program_id(0)` from its tiles."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    regime = tl.load(regimes_ptr + request)
    if regime == 0:
        return
    temperature = tl.load(temperatures_ptr + request)
    best, best_id, mass, is_valid = join_stats(
        tile_best_ptr, tile_ids_ptr, tile_masses_ptr, tile_bad_ptr, row, num_tiles, temperature, MAX_TILES
    )
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    threshold = tl.full([], float("-inf"), tl.float32)
    last_id = tl.full([], _ALL_IDS, tl.int32)
    top_k, top_p = tl.load(top_k_ptr + request), tl.load(top_p_ptr + request)
    floor = tl.minimum(tl.load(min_p_ptr + request), 1.0)
    if is_valid & (regime != GREEDY):
        if (top_k > 0) & (top_k < vocab_size):
            threshold, last_id = _search(row_ptr, vocab_size, best, temperature, top_k.to(tl.float64), False, BLOCK)
            mass = _kept_mass(row_ptr, vocab_size, best, temperature, threshold, last_id, 0.0, BLOCK)
        if top_p < 1.0:
            threshold, last_id = _search(row_ptr, vocab_size, best, temperature, top_p * mass, True, BLOCK)
        if (top_p < 1.0) | (floor > 0.0):
            mass = _kept_mass(row_ptr, vocab_size, best, temperature, threshold, last_id, floor, BLOCK)
    tl.store(best_ptr + row, best)
    tl.store(best_ids_ptr + row, best_id)
    tl.store(masses_ptr + row, tl.where(is_valid, mass, 1.0))
    tl.store(thresholds_ptr + row, threshold)
    tl.store(last_ids_ptr + row, last_id)
    tl.store(floors_ptr + row, floor)
    tl.store(is_valid_ptr + row, is_valid.to(tl.int32))


@triton.jit
def target_probs_kernel(
    logits_ptr, logits_stride, request_of_row_ptr, regimes_ptr, temperatures_ptr,
    best_ptr, best_ids_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, probs_ptr, probs_stride, vocab_size,
    BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Probabilities of tile `program_id(1)` of row `program_id(0)`."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    regime = tl.load(regimes_ptr + request)
    if regime == 0:
        return
    ids = tl.program_id(1) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, ids < vocab_size, other=float("-inf"))
    best, temperature = tl.load(best_ptr + row), tl.load(temperatures_ptr + request)
    logits, threshold, last_id = logits.to(tl.float32), tl.load(thresholds_ptr + row), tl.load(last_ids_ptr + row)
    kept = is_kept(logits, ids, threshold, last_id, tl.load(floors_ptr + row), best, temperature)
    probs = tl.where(kept, weights_of(logits, best, temperature), 0.0).to(tl.float64) / tl.load(masses_ptr + row)
    if regime == GREEDY:
        probs = tl.where(ids == tl.load(best_ids_ptr + row), 1.0, 0.0).to(tl.float64)
    tl.store(probs_ptr + row.to(tl.int64) * probs_stride + ids, probs, ids < vocab_size)


def summarise(
    logits: Tensor, request_of_row: Tensor, rows: SamplingRows, block_vocab: int = BLOCK_VOCAB
) -> RowSummaries:
    """Summaries of `logits` [M, V], float32 or bfloat16; request_of_row [M] int32, -1 for rows of nobody."""
    num_rows, vocab_size = logits.shape
    stats: TileStats = tile_stats(logits, request_of_row, rows, block_vocab)
    summaries = RowSummaries(*(logits.new_empty(num_rows, dtype=dtype) for dtype in _SUMMARY_DTYPES))
    num_tiles = stats.best.shape[1]
    row_summary_kernel[(num_rows,)](
        logits, logits.stride(0), request_of_row,
        rows.regimes, rows.temperatures, rows.top_k, rows.top_p, rows.min_p, *stats, *summaries, vocab_size, num_tiles,
        MAX_TILES=triton.next_power_of_2(num_tiles), BLOCK=min(_BLOCK_SEARCH, block_vocab), num_warps=8,
    )  # fmt: skip
    return summaries


_SUMMARY_DTYPES = torch.float32, torch.int32, torch.float64, torch.float32, torch.int32, torch.float32, torch.int32


def target_probs_of(
    logits: Tensor, request_of_row: Tensor, rows: SamplingRows, probs: Tensor, block_vocab: int = BLOCK_VOCAB
) -> RowSummaries:
    """Writes the distributions of `logits` [M, V] to `probs` [M, V] float64; rows of nobody are left alone, and the
    values of rows whose summary is not valid mean nothing."""
    summaries = summarise(logits, request_of_row, rows, block_vocab)
    num_rows, vocab_size = logits.shape
    target_probs_kernel[num_rows, triton.cdiv(vocab_size, block_vocab)](
        logits, logits.stride(0), request_of_row, rows.regimes, rows.temperatures,
        *summaries[:6], probs, probs.stride(0), vocab_size, BLOCK_VOCAB=block_vocab, num_warps=8,
    )  # fmt: skip
    return summaries


def target_probs(logits: npt.NDArray[np.float32], sampling: SlotSampling) -> npt.NDArray[np.float64]:
    """Filtered target distributions, [n, V]. Raises InvalidRowError (see the package)."""
    rows, on_device = SamplingRows.of([sampling]), torch.from_numpy(logits)
    probs = torch.empty(logits.shape, dtype=torch.float64)
    summaries = target_probs_of(on_device, torch.zeros(len(logits), dtype=torch.int32), rows, probs)
    if not bool(summaries.is_valid.all()):
        raise InvalidRowError("target logits hold NaN or +inf, or no finite value")
    return probs.numpy()
