"""What the attention kernels for CPUs share: a softmax that runs over the positions of a context.

The arithmetic of a query is fixed by its own context. Positions are cut into segments of 256 and these into chunks of
64, counted from position 0, whatever pages they are on. A segment runs over its chunks: scores of 16 positions in the
16 lanes (one chain of fused multiply-adds over the head), maximum, rescale, weighted sum of V position by position.
Segments are computed apart and merged into the first in order, so that threads can share one row's context. Positions
that a query does not see have weight exactly 0, and chunks or segments of such positions leave a state as it was: they
are skipped or not with the same result. Which queries share a chunk's K and V, and in which registers, changes nothing.
K and V in float16 are widened once a chunk, for all queries that share it; all arithmetic is that of float32 pages.
Softmax with a running maximum: Milakov & Gimelshein 2018; merged parts: Dao et al. 2023 (Flash-Decoding).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cpu.jit import HAS_AVX512, compiled, types
from kernels.cpu.packed import load_as
from kernels.cpu.pages import Pages, locate
from kernels.cpu.simd import (
    LANES,
    exp2,
    fma,
    fma_each,
    keep_lanes,
    load,
    load_each,
    load_float,
    max_lanes,
    maximum,
    prefetch,
    scale_each,
    splat,
    store,
    store_each,
    store_float,
    sum_lanes,
)

_VECTORS = 4
CHUNK = _VECTORS * LANES
SEGMENT = 4 * CHUNK
_FLOOR = -1e30
"""Below any score, and finite: differences are numbers even before the first visible position."""
_HAS_WIDE_TILES = HAS_AVX512
"""Room for the sums of 6 queries in registers; they share every K and V that is loaded."""

PARALLEL_WORK = 1 << 18
"""Elements of queries times positions read, above which a second thread pays."""


class State(NamedTuple):
    """Softmax of queries over a part of their context, as element offsets from `base`."""

    base: int
    sums: int  # [num_queries, head_dim], weighted sums of V
    weights: int  # [num_queries, 16], sums of softmax weights by lane
    maxima: int  # [num_queries], largest score so far


class Queries(NamedTuple):
    """A group of queries (row · group + head) and working memory, as element offsets from `base`."""

    base: int
    num_rows: int
    group: int  # queries of a row
    head_dim: int
    queries: int  # [num_queries, head_dim], rotated, times log2(e) / sqrt(head_dim)
    scores: int  # [num_queries, CHUNK], then weights of one chunk
    rescales: int  # [num_queries, 16]
    wide: int  # K [head_dim, CHUNK], then V [CHUNK, head_dim], of a chunk that is float16 in memory


class Chunk(NamedTuple):
    """Up to 64 positions of K and V, as addresses and offsets in units of 4 bytes: an element, or two of float16."""

    position: int  # of the first of them
    first_vector: int  # vectors of 16 positions that any query may see; others are not read
    num_lanes: int  # positions from the first of the chunk to the last that any query sees
    keys: int
    key_starts: Any  # 4 vectors
    key_stride: int  # from one element of the head to the next; positions are adjacent
    values: int
    value_starts: Any  # 4 vectors
    value_stride: int  # from one position to the next; elements are adjacent
    is_half: int  # 1 for float16, which `attend` widens; 0 for float32


@compiled
def next_line(address: int) -> int:
    """The first cache line from an address on: vectors of what is laid out there lie in one line each."""
    line: int = (types.int64(address) + 4 * LANES - 1) // (4 * LANES) * (4 * LANES)
    return line


@compiled
def state_size(num_queries: int, head_dim: int) -> int:
    """Elements of a `State`."""
    return num_queries * (head_dim + LANES) + (num_queries + LANES - 1) // LANES * LANES


@compiled
def state_at(base: int, start: int, num_queries: int, head_dim: int) -> State:
    """The `State` in `state_size` elements from `start`."""
    weights = start + num_queries * head_dim
    return State(base, start, weights, weights + num_queries * LANES)


@compiled
def make_state(base: int, start: int, num_queries: int, head_dim: int) -> State:
    """An empty `State` in `state_size` elements from `start`."""
    state: State = state_at(base, start, num_queries, head_dim)
    for index in range(start, state.maxima, LANES):
        store(base, index, splat(0.0))
    for query in range(num_queries):
        store_float(base, state.maxima + query, types.float32(_FLOOR))
    return state


@compiled
def queries_size(num_queries: int, head_dim: int) -> int:
    """Elements of `Queries`."""
    return num_queries * (head_dim + CHUNK + LANES) + CHUNK * head_dim


@compiled
def make_queries(base: int, num_rows: int, group: int, head_dim: int) -> Queries:
    """Lays out `Queries` in `queries_size` elements at `base`."""
    scores = num_rows * group * head_dim
    rescales = scores + num_rows * group * CHUNK
    wide = rescales + num_rows * group * LANES
    return Queries(base, num_rows, group, head_dim, 0, scores, rescales, wide)


@compiled
def _widen_keys(queries: Queries, chunk: Chunk) -> Chunk:
    """The chunk with K of float16 as float32 in the working memory; vectors that no query sees are not read."""
    half, base, head_dim = types.int16(0), queries.base, queries.head_dim
    last_vector = (chunk.num_lanes - 1) // LANES
    for vector in range(chunk.first_vector, last_vector + 1):
        source, target = 2 * chunk.key_starts[vector], queries.wide + vector * LANES
        for element in range(head_dim):
            lanes = load_as(half, chunk.keys, source + 2 * element * chunk.key_stride)
            store(base, target + element * CHUNK, lanes)
    one, four = queries.wide + chunk.first_vector * LANES, queries.wide + last_vector * LANES
    two, three = min(max(one, queries.wide + LANES), four), min(max(one, queries.wide + 2 * LANES), four)
    seen = chunk.position, chunk.first_vector, chunk.num_lanes
    starts = one, two, three, four
    return Chunk(*seen, base, starts, CHUNK, chunk.values, chunk.value_starts, chunk.value_stride, 1)


@compiled
def _widen_values(queries: Queries, chunk: Chunk) -> Chunk:
    """The same with V, in the same place: it is the working memory that stays in the CPU's nearest cache."""
    half, base, head_dim = types.int16(0), queries.base, queries.head_dim
    size = LANES * head_dim
    for vector in range(chunk.first_vector, (chunk.num_lanes + LANES - 1) // LANES):
        source, target = 2 * chunk.value_starts[vector], queries.wide + vector * size
        for _ in range(min(chunk.num_lanes - vector * LANES, LANES)):
            for offset in range(0, head_dim, LANES):
                store(base, target + offset, load_as(half, chunk.values, source + offset))
            source += 2 * chunk.value_stride
            target += head_dim
    seen = chunk.position, chunk.first_vector, chunk.num_lanes
    starts = queries.wide, queries.wide + size, queries.wide + 2 * size, queries.wide + 3 * size
    return Chunk(*seen, chunk.keys, chunk.key_starts, chunk.key_stride, base, starts, head_dim, 0)


@compiled
def _score(zeros: Any, queries: Queries, query: int, chunk: Chunk, ahead: Chunk) -> None:
    first, second, third, fourth = zeros, zeros, zeros, zeros
    base, head_dim, stride, next_stride = queries.base, queries.head_dim, chunk.key_stride, ahead.key_stride
    starts, next_starts = chunk.key_starts, ahead.key_starts
    source, target = queries.queries + query * head_dim, queries.scores + query * CHUNK
    for element in range(head_dim):
        place = element * stride
        if query == 0:
            for vector in range(_VECTORS):
                prefetch(ahead.keys, next_starts[vector] + element * next_stride)
        first = fma_each(first, base, source + element, head_dim, load(chunk.keys, starts[0] + place))
        second = fma_each(second, base, source + element, head_dim, load(chunk.keys, starts[1] + place))
        third = fma_each(third, base, source + element, head_dim, load(chunk.keys, starts[2] + place))
        fourth = fma_each(fourth, base, source + element, head_dim, load(chunk.keys, starts[3] + place))
    store_each(first, base, target, CHUNK)
    store_each(second, base, target + LANES, CHUNK)
    store_each(third, base, target + 2 * LANES, CHUNK)
    store_each(fourth, base, target + 3 * LANES, CHUNK)


@compiled
def _visible(queries: Queries, place: int, vector: int, first: int, last: int) -> Any:
    scores = load(queries.base, place + vector * LANES)
    return keep_lanes(scores, first - vector * LANES, last - vector * LANES, splat(_FLOOR))


@compiled
def _weight(queries: Queries, place: int, vector: int, first: int, last: int, score: Any, largest: Any) -> Any:
    weight = keep_lanes(exp2(score - largest), first - vector * LANES, last - vector * LANES, splat(0.0))
    store(queries.base, place + vector * LANES, weight)
    return weight


@compiled
def _weigh(queries: Queries, state: State, query: int, first: int, last: int) -> None:
    """Scores of a query to weights, of which those outside lanes first … last are 0."""
    place = queries.scores + query * CHUNK
    one = _visible(queries, place, 0, first, last)
    two = _visible(queries, place, 1, first, last)
    three = _visible(queries, place, 2, first, last)
    four = _visible(queries, place, 3, first, last)
    old = load_float(state.base, state.maxima + query)
    new = max(old, max_lanes(maximum(maximum(one, two), maximum(three, four))))
    largest, rescale = splat(new), exp2(splat(old - new))
    left: Any = _weight(queries, place, 0, first, last, one, largest)
    left = left + _weight(queries, place, 1, first, last, two, largest)
    right: Any = _weight(queries, place, 2, first, last, three, largest)
    right = right + _weight(queries, place, 3, first, last, four, largest)
    total = state.weights + query * LANES
    store(state.base, total, fma(load(state.base, total), rescale, left + right))
    store_float(state.base, state.maxima + query, new)
    store(queries.base, queries.rescales + query * LANES, rescale)


@compiled
def _accumulate(zeros: Any, queries: Queries, state: State, query: int, chunk: Chunk, ahead: Chunk) -> None:
    base, head_dim, width = queries.base, queries.head_dim, _VECTORS * LANES
    weights, rescales = queries.scores + query * CHUNK, queries.rescales + query * LANES
    wide, half = head_dim - head_dim % width, ahead.is_half
    for offset in range(0, wide, width):
        place = state.sums + query * head_dim + offset
        first = scale_each(load_each(zeros, state.base, place, head_dim), base, rescales, LANES)
        second = scale_each(load_each(zeros, state.base, place + LANES, head_dim), base, rescales, LANES)
        third = scale_each(load_each(zeros, state.base, place + 2 * LANES, head_dim), base, rescales, LANES)
        fourth = scale_each(load_each(zeros, state.base, place + 3 * LANES, head_dim), base, rescales, LANES)
        for vector in range(chunk.first_vector, (chunk.num_lanes + LANES - 1) // LANES):
            value, next_value = chunk.value_starts[vector] + offset, ahead.value_starts[vector] + (offset >> half)
            for lane in range(vector * LANES, min(vector * LANES + LANES, chunk.num_lanes)):
                if query == 0:
                    for part in range(_VECTORS):
                        prefetch(ahead.values, next_value + (part * LANES >> half))
                first = fma_each(first, base, weights + lane, CHUNK, load(chunk.values, value))
                second = fma_each(second, base, weights + lane, CHUNK, load(chunk.values, value + LANES))
                third = fma_each(third, base, weights + lane, CHUNK, load(chunk.values, value + 2 * LANES))
                fourth = fma_each(fourth, base, weights + lane, CHUNK, load(chunk.values, value + 3 * LANES))
                value += chunk.value_stride
                next_value += ahead.value_stride
        store_each(first, state.base, place, head_dim)
        store_each(second, state.base, place + LANES, head_dim)
        store_each(third, state.base, place + 2 * LANES, head_dim)
        store_each(fourth, state.base, place + 3 * LANES, head_dim)
    for offset in range(wide, head_dim, LANES):
        place = state.sums + query * head_dim + offset
        only = scale_each(load_each(zeros, state.base, place, head_dim), base, rescales, LANES)
        for vector in range(chunk.first_vector, (chunk.num_lanes + LANES - 1) // LANES):
            value = chunk.value_starts[vector] + offset
            for lane in range(vector * LANES, min(vector * LANES + LANES, chunk.num_lanes)):
                only = fma_each(only, base, weights + lane, CHUNK, load(chunk.values, value))
                value += chunk.value_stride
        store_each(only, state.base, place, head_dim)


@compiled
def attend(queries: Queries, state: State, first_seen: Any, last_seen: Any, chunk: Chunk, ahead: Chunk) -> None:
    """Takes one chunk into the state of all queries; a row sees positions first … last. `ahead` will be read next."""
    zero = splat(0.0)
    num_queries, query = queries.num_rows * queries.group, 0
    if chunk.is_half:
        chunk = _widen_keys(queries, chunk)
    if _HAS_WIDE_TILES:
        while query + 6 <= num_queries:
            _score((zero, zero, zero, zero, zero, zero), queries, query, chunk, ahead)
            query += 6
        while query + 3 <= num_queries:
            _score((zero, zero, zero), queries, query, chunk, ahead)
            query += 3
    while query < num_queries:
        _score((zero,), queries, query, chunk, ahead)
        query += 1
    for row in range(queries.num_rows):
        first, last = first_seen[row] - chunk.position, last_seen[row] - chunk.position
        for head in range(queries.group):
            _weigh(queries, state, row * queries.group + head, first, last)
    if chunk.is_half:
        chunk = _widen_values(queries, chunk)
    query = 0
    if _HAS_WIDE_TILES:
        while query + 6 <= num_queries:
            _accumulate((zero, zero, zero, zero, zero, zero), queries, state, query, chunk, ahead)
            query += 6
        while query + 3 <= num_queries:
            _accumulate((zero, zero, zero), queries, state, query, chunk, ahead)
            query += 3
    while query < num_queries:
        _accumulate((zero,), queries, state, query, chunk, ahead)
        query += 1


@compiled
def _chunk_at(pages: Pages, slot: int, kv_head: int, position: int, first: int, last: int) -> Chunk:
    """The chunk from `position` on; vectors without any of the positions first … last repeat one that has."""
    first_vector = max(first - position, 0) // LANES
    last_vector = min(last - position, CHUNK - 1) // LANES
    one = locate(pages, slot, position + max(first_vector, 0) * LANES, kv_head)
    two = locate(pages, slot, position + min(max(first_vector, 1), last_vector) * LANES, kv_head)
    three = locate(pages, slot, position + min(max(first_vector, 2), last_vector) * LANES, kv_head)
    four = locate(pages, slot, position + last_vector * LANES, kv_head)
    half = pages.is_half
    return Chunk(
        position,
        first_vector,
        min(last - position + 1, CHUNK),
        pages.keys,
        (one[0] >> half, two[0] >> half, three[0] >> half, four[0] >> half),
        pages.page_size >> half,
        pages.values,
        (one[1] >> half, two[1] >> half, three[1] >> half, four[1] >> half),
        pages.head_dim >> half,
        half,
    )


@compiled
def attend_pages(
    queries: Queries,
    state: State,
    first_seen: Any,
    last_seen: Any,
    pages: Pages,
    slot: int,
    kv_head: int,
    begin: int,
    end: int,
) -> None:
    """Takes positions begin … end - 1 of a slot's pages, one K/V head of them, into the state of all queries.

    `begin` is a multiple of SEGMENT, `end` at most SEGMENT more.
    """
    first, last = first_seen[0], last_seen[0]
    for row in range(1, queries.num_rows):
        first, last = min(first, first_seen[row]), max(last, last_seen[row])
    first, last = max(first, begin), min(last, end - 1)
    position = first - first % CHUNK
    if first > last:
        return
    chunk = _chunk_at(pages, slot, kv_head, position, first, last)
    while position <= last:
        position += CHUNK
        ahead = _chunk_at(pages, slot, kv_head, position, first, last) if position <= last else chunk
        attend(queries, state, first_seen, last_seen, chunk, ahead)
        chunk = ahead


@compiled
def merge(state: State, part: State, num_queries: int, head_dim: int) -> None:
    """Takes the state of the positions that follow into `state`."""
    for query in range(num_queries):
        old, other = load_float(state.base, state.maxima + query), load_float(part.base, part.maxima + query)
        new = max(old, other)
        left, right = exp2(splat(old - new)), exp2(splat(other - new))
        for offset in range(0, head_dim, LANES):
            place, source = state.sums + query * head_dim + offset, part.sums + query * head_dim + offset
            kept: Any = load(state.base, place) * left
            store(state.base, place, fma(load(part.base, source), right, kept))
        place, source = state.weights + query * LANES, part.weights + query * LANES
        kept = load(state.base, place) * left
        store(state.base, place, fma(load(part.base, source), right, kept))
        store_float(state.base, state.maxima + query, new)


@compiled
def finish(state: State, query: int, head_dim: int, out: int, out_start: int) -> None:
    """Writes a query's result; a zero without its sign, which could tell how many empty segments were merged."""
    total = splat(sum_lanes(load(state.base, state.weights + query * LANES)))
    for offset in range(0, head_dim, LANES):
        sums: Any = load(state.base, state.sums + query * head_dim + offset) + splat(0.0)
        store(out, out_start + offset, sums / total)
