"""A vocabulary in tiles: each program looks at one tile of one row, and a later launch joins a row's tiles in order.

Tiles and the order in which they are joined are fixed by the vocabulary alone, so a row's bits do not depend on the
rows beside it. Weights of tokens are float32, their sums float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.noise import coupled_words_from, coupled_words_of, unit_exponential
from kernels.triton.rows import SamplingRows

BLOCK_VOCAB = 4096
"""Tokens of a tile."""
GREEDY, COUPLED, REJECTION = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""`kernels.sampling.Regime`."""
FLOAT_MAX = tl.constexpr(3.4028234e38)


class TileStats(NamedTuple):
    """Of every row's tiles, [M, tiles]."""

    best: Tensor
    """float32: the largest logit."""
    best_ids: Tensor
    """int32: the first token that has it."""
    masses: Tensor
    """float64: sum of exp((logit - best) / temperature)."""
    is_bad: Tensor
    """int32: whether there is NaN or +inf."""


class Picks(NamedTuple):
    """Best coupled draw of every tile, [M, tiles]."""

    scores: Tensor
    """float32: logit / temperature - log E; -inf if nothing can be drawn."""
    ids: Tensor
    """int32 places in the row."""


@triton.jit
def weights_of(logits, best, temperature):
    """exp((logit - best) / temperature), 0 for a masked token; `best` is at least each of them."""
    is_weighed = logits >= -FLOAT_MAX
    weights = tl.exp(tl.where(is_weighed, logits - tl.maximum(best, -FLOAT_MAX), 0.0) / temperature)
    return tl.where(is_weighed, weights, 0.0)


@triton.jit
def is_kept(logits, ids, threshold, last_id, floor, best, temperature):
    """Whether filters keep tokens: a prefix of the ranking by logit, then id; of it what min-p leaves."""
    is_in_prefix = (logits > threshold) | ((logits == threshold) & (ids <= last_id))
    return is_in_prefix & (weights_of(logits, best, temperature) >= floor)


@triton.jit
def first_of_largest(values, ids):
    """The largest of `values` [n] and the lowest of its ids; no NaN."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, 2147483647), 0)


@triton.jit
def place_of_mass(masses, places, rest):
    """First of `places` [n], ascending, whose running mass exceeds `rest`, and the mass before it; float64.

    Never a place without mass: rounding may carry the walk past the end, the last place with mass is the answer then.
    """
    before = tl.cumsum(masses, 0) - masses
    is_candidate = masses > 0.0
    last = tl.max(tl.where(is_candidate, places, -1), 0)
    first = tl.min(tl.where(is_candidate & (before + masses > rest), places, 2147483647), 0)
    place = tl.minimum(first, last)
    return place, tl.sum(tl.where(places == place, before, 0.0), 0)


@triton.jit
def tile_stats_kernel(
    logits_ptr, logits_stride, request_of_row_ptr, regimes_ptr, temperatures_ptr,
    best_ptr, best_ids_ptr, masses_ptr, is_bad_ptr, vocab_size, num_tiles, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """`TileStats` of tile `program_id(1)` of row `program_id(0)`."""
    row, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    if tl.load(regimes_ptr + request) == 0:
        return
    ids = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    logits = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
    is_bad = (logits != logits) | (logits > FLOAT_MAX)
    logits = tl.where(is_bad, float("-inf"), logits)
    best, best_id = first_of_largest(logits, ids)
    weights = weights_of(logits, best, tl.load(temperatures_ptr + request))
    place = row * num_tiles + tile
    tl.store(best_ptr + place, best)
    tl.store(best_ids_ptr + place, best_id)
    tl.store(masses_ptr + place, tl.sum(weights.to(tl.float64), 0))
    tl.store(is_bad_ptr + place, tl.max(is_bad.to(tl.int32), 0))


@triton.jit
def join_stats(
    best_ptr, best_ids_ptr, masses_ptr, is_bad_ptr, row, num_tiles, temperature, MAX_TILES: tl.constexpr
):  # fmt: skip
    """Best logit, its id, mass relative to it, and whether the row can be sampled from."""
    tiles = tl.arange(0, MAX_TILES)
    is_tile, places = tiles < num_tiles, row * num_tiles + tiles
    bests = tl.load(best_ptr + places, is_tile, other=float("-inf"))
    best, best_id = first_of_largest(bests, tl.load(best_ids_ptr + places, is_tile, other=2147483647))
    num_bad = tl.sum(tl.load(is_bad_ptr + places, is_tile, other=0), 0)
    is_valid = (num_bad == 0) & (best >= -FLOAT_MAX)
    masses = tl.load(masses_ptr + places, is_tile, other=0.0)
    mass = tl.sum(masses * weights_of(bests, best, temperature).to(tl.float64), 0)
    return best, best_id, mass, is_valid


@triton.jit(do_not_specialize=["offset"])
def tile_picks_kernel(
    logits_ptr, logits_stride, request_of_row_ptr, row_starts_ptr, regimes_ptr, temperatures_ptr, keys_ptr,
    positions_ptr, offset, target_ids_ptr, best_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, scores_ptr, picks_ptr,
    vocab_size, num_tiles,
    HAS_TARGET_IDS: tl.constexpr, HAS_FILTER: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """`Picks` of tile `program_id(1)` of row `program_id(0)`, if that is coupled.

    The row's token is at its request's position + offset + the row's place after the request's first row.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    if tl.load(regimes_ptr + request) != COUPLED:
        return
    ids = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    key = tl.load(keys_ptr + request)
    position = tl.load(positions_ptr + request) + (row - tl.load(row_starts_ptr + request) + offset)
    if HAS_TARGET_IDS:
        words = coupled_words_of(tl.load(target_ids_ptr + ids, ids < vocab_size, other=0), key, position)
    else:
        words = coupled_words_from(tile * BLOCK_VOCAB, key, position, BLOCK_VOCAB)
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, ids < vocab_size, other=float("-inf"))
    logits, temperature = logits.to(tl.float32), tl.load(temperatures_ptr + request)
    is_candidate = (logits >= -FLOAT_MAX) & (logits <= FLOAT_MAX)
    if HAS_FILTER:
        is_candidate &= is_kept(
            logits,
            ids,
            tl.load(thresholds_ptr + row),
            tl.load(last_ids_ptr + row),
            tl.load(floors_ptr + row),
            tl.load(best_ptr + row),
            temperature,
        )
    noise = tl.log(unit_exponential(words))
    scores = tl.where(is_candidate, tl.where(is_candidate, logits, 0.0) / temperature - noise, float("-inf"))
    score, pick = first_of_largest(scores, ids)
    tl.store(scores_ptr + row * num_tiles + tile, score)
    tl.store(picks_ptr + row * num_tiles + tile, pick)


@triton.jit
def join_picks(scores_ptr, picks_ptr, row, num_tiles, MAX_TILES: tl.constexpr):
    """A row's best coupled draw."""
    tiles = tl.arange(0, MAX_TILES)
    is_tile, places = tiles < num_tiles, row * num_tiles + tiles
    scores = tl.load(scores_ptr + places, is_tile, other=float("-inf"))
    _, pick = first_of_largest(scores, tl.load(picks_ptr + places, is_tile, other=2147483647))
    return pick


def num_tiles_of(vocab_size: int, block_vocab: int) -> int:
    """Tiles of a row."""
    return int(triton.cdiv(vocab_size, block_vocab))


def tile_stats(logits: Tensor, request_of_row: Tensor, rows: SamplingRows, block_vocab: int) -> TileStats:
    """Looks at `logits` [M, V] once. request_of_row [M] int32, -1 for rows of nobody, whose entries stay undefined."""
    num_rows, vocab_size = logits.shape
    shape = num_rows, num_tiles_of(vocab_size, block_vocab)
    stats = TileStats(*(logits.new_empty(shape, dtype=dtype) for dtype in _STATS_DTYPES))
    tile_stats_kernel[shape](
        logits, logits.stride(0), request_of_row, rows.regimes, rows.temperatures,
        *stats, vocab_size, shape[1], BLOCK_VOCAB=block_vocab, num_warps=8,
    )  # fmt: skip
    return stats


def tile_picks(
    logits: Tensor,
    request_of_row: Tensor,
    row_starts: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    offset: int,
    target_ids: Tensor | None,
    filters: Sequence[Tensor] | None,
    block_vocab: int,
) -> Picks:
    """Coupled draws of the coupled rows of `logits` [M, V]; entries of the others stay undefined.

    row_starts [R] int32, positions [R] int64 and `offset` place a row's token, see the kernel; target_ids [V] int32,
    None for the identity; filters, [M] each: best logits, thresholds, last ids and floors of
    `kernels.target_probs.triton.RowSummaries`, None where nothing was removed.
    """
    num_rows, vocab_size = logits.shape
    shape = num_rows, num_tiles_of(vocab_size, block_vocab)
    picks = Picks(*(logits.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.int32)))
    nothing = rows.regimes
    tile_picks_kernel[shape](
        logits, logits.stride(0), request_of_row, row_starts, rows.regimes, rows.temperatures, rows.keys,
        positions, offset, nothing if target_ids is None else target_ids,
        *([nothing] * 4 if filters is None else filters), *picks, vocab_size, shape[1],
        HAS_TARGET_IDS=target_ids is not None, HAS_FILTER=filters is not None, BLOCK_VOCAB=block_vocab, num_warps=8,
    )  # fmt: skip
    return picks


_STATS_DTYPES = torch.float32, torch.int32, torch.float64, torch.int32
