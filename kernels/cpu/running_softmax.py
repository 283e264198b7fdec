"""What the attention kernels for CPUs share: one running softmax over chunks of 16 positions.

A query meets the chunks of its context in order of position, whatever page they are on, with the same arithmetic in
each: scores of 16 positions in the 16 lanes (even and odd elements of the head summed apart), maximum, rescale,
weighted sum of V position by position. Positions that a query does not see have weight exactly 0, and a chunk of such
positions leaves its state as it was. So a result depends on the query and its context alone, never on other rows.
Softmax with a running maximum: Milakov & Gimelshein 2018.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels.cpu.jit import compiled, types
from kernels.cpu.pages import Pages, locate
from kernels.cpu.simd import (
    LANES,
    add_each,
    exp2,
    fma,
    fma_each,
    keep_lanes,
    load,
    load_each,
    load_float,
    max_lanes,
    prefetch,
    scale_each,
    splat,
    store,
    store_each,
    store_float,
    sum_lanes,
)

_FLOOR = -1e30
"""Below any score, and finite: differences are numbers even before the first visible position."""
_UNROLLED = 4
"""Queries whose sums are in registers together; they share every K and V that is loaded."""


PARALLEL_WORK = 1 << 19
"""Elements of queries times positions read, above which a second thread pays (some 20 µs of work)."""


class Scratch(NamedTuple):
    """Working memory of one group of queries, as element offsets from `base`."""

    base: int
    queries: int  # [num_queries, head_dim], rotated, times log2(e) / sqrt(head_dim)
    sums: int  # [num_queries, head_dim], weighted sums of V
    weights: int  # [num_queries, 16], sums of softmax weights by lane
    maxima: int  # [num_queries], largest score so far
    scores: int  # [4, 16], then weights of one chunk
    rescales: int  # [4, 16]


class Chunk(NamedTuple):
    """Sixteen positions of K and V, as addresses and element offsets."""

    position: int  # of the first of them
    keys: int
    key_start: int
    key_stride: int  # from one element of the head to the next; positions are adjacent
    values: int
    value_start: int
    value_stride: int  # from one position to the next; elements are adjacent
    next_key_start: int  # of the chunk that will be read next, to have it in cache by then
    next_value_start: int


@compiled
def scratch_size(num_queries: int, head_dim: int) -> int:
    """Elements of a `Scratch`."""
    return num_queries * (2 * head_dim + LANES + 1) + 2 * _UNROLLED * LANES


@compiled
def make_scratch(base: int, num_queries: int, head_dim: int) -> Scratch:
    """Lays out a `Scratch` in `scratch_size` elements at `base` and empties its state."""
    sums = num_queries * head_dim
    weights = sums + num_queries * head_dim
    scores = weights + num_queries * LANES
    rescales = scores + _UNROLLED * LANES
    maxima = rescales + _UNROLLED * LANES
    for index in range(sums, scores, LANES):
        store(base, index, splat(0.0))
    for query in range(num_queries):
        store_float(base, maxima + query, types.float32(_FLOOR))
    return Scratch(base, 0, sums, weights, maxima, scores, rescales)


@compiled
def _score(zeros: Any, scratch: Scratch, queries: int, head_dim: int, chunk: Chunk, is_first: bool) -> None:
    even, odd = zeros, zeros
    for element in range(0, head_dim, 2):
        if is_first:
            prefetch(chunk.keys, chunk.next_key_start + element * chunk.key_stride)
            prefetch(chunk.keys, chunk.next_key_start + (element + 1) * chunk.key_stride)
            prefetch(chunk.values, chunk.next_value_start + element * LANES)
            prefetch(chunk.values, chunk.next_value_start + (element + 1) * LANES)
        key = load(chunk.keys, chunk.key_start + element * chunk.key_stride)
        even = fma_each(even, scratch.base, queries + element, head_dim, key)
        key = load(chunk.keys, chunk.key_start + (element + 1) * chunk.key_stride)
        odd = fma_each(odd, scratch.base, queries + element + 1, head_dim, key)
    store_each(add_each(even, odd), scratch.base, scratch.scores, LANES)


@compiled
def _weigh(scratch: Scratch, query: int, slot: int, first_lane: int, last_lane: int) -> None:
    base, scores = scratch.base, scratch.scores + slot * LANES
    visible = keep_lanes(load(base, scores), first_lane, last_lane, splat(_FLOOR))
    old_maximum = load_float(base, scratch.maxima + query)
    maximum = max(old_maximum, max_lanes(visible))
    rescale = exp2(splat(old_maximum - maximum))
    weights = keep_lanes(exp2(visible - splat(maximum)), first_lane, last_lane, splat(0.0))
    total = scratch.weights + query * LANES
    store(base, total, fma(load(base, total), rescale, weights))
    store_float(base, scratch.maxima + query, maximum)
    store(base, scratch.rescales + slot * LANES, rescale)
    store(base, scores, weights)


@compiled
def _accumulate(zeros: Any, scratch: Scratch, sums: int, head_dim: int, chunk: Chunk, num_lanes: int) -> None:
    base, scores = scratch.base, scratch.scores
    paired = head_dim - head_dim % (2 * LANES)
    for offset in range(0, paired, 2 * LANES):
        left = scale_each(load_each(zeros, base, sums + offset, head_dim), base, scratch.rescales, LANES)
        right = scale_each(load_each(zeros, base, sums + offset + LANES, head_dim), base, scratch.rescales, LANES)
        for lane in range(num_lanes):
            value = chunk.value_start + lane * chunk.value_stride + offset
            left = fma_each(left, base, scores + lane, LANES, load(chunk.values, value))
            right = fma_each(right, base, scores + lane, LANES, load(chunk.values, value + LANES))
        store_each(left, base, sums + offset, head_dim)
        store_each(right, base, sums + offset + LANES, head_dim)
    if paired < head_dim:
        left = scale_each(load_each(zeros, base, sums + paired, head_dim), base, scratch.rescales, LANES)
        for lane in range(num_lanes):
            value = load(chunk.values, chunk.value_start + lane * chunk.value_stride + paired)
            left = fma_each(left, base, scores + lane, LANES, value)
        store_each(left, base, sums + paired, head_dim)


@compiled
def _attend_few(
    zeros: Any,
    scratch: Scratch,
    start: int,
    group: int,
    head_dim: int,
    first_seen: Any,
    last_seen: Any,
    chunk: Chunk,
    num_lanes: int,
) -> None:
    _score(zeros, scratch, scratch.queries + start * head_dim, head_dim, chunk, start == 0)
    for slot in range(len(zeros)):
        row = (start + slot) // group
        first_lane, last_lane = first_seen[row] - chunk.position, last_seen[row] - chunk.position
        _weigh(scratch, start + slot, slot, first_lane, last_lane)
    _accumulate(zeros, scratch, scratch.sums + start * head_dim, head_dim, chunk, num_lanes)


@compiled
def attend(
    scratch: Scratch, num_rows: int, group: int, head_dim: int, first_seen: Any, last_seen: Any, chunk: Chunk
) -> None:
    """Takes one chunk into the state of all queries (row · group + head); a row sees positions first … last."""
    zero = splat(0.0)
    num_lanes = 0
    for row in range(num_rows):  # V beyond the last position that any row sees may never have been written
        num_lanes = max(num_lanes, min(LANES, last_seen[row] - chunk.position + 1))
    num_queries, start = num_rows * group, 0
    seen = (first_seen, last_seen)
    while start + 4 <= num_queries:
        _attend_few((zero, zero, zero, zero), scratch, start, group, head_dim, *seen, chunk, num_lanes)
        start += 4
    if num_queries - start == 3:
        _attend_few((zero, zero, zero), scratch, start, group, head_dim, *seen, chunk, num_lanes)
    elif num_queries - start == 2:
        _attend_few((zero, zero), scratch, start, group, head_dim, *seen, chunk, num_lanes)
    elif num_queries - start == 1:
        _attend_few((zero,), scratch, start, group, head_dim, *seen, chunk, num_lanes)


@compiled
def finish(scratch: Scratch, query: int, head_dim: int, out: int, out_start: int) -> None:
    """Writes a query's result."""
    total = splat(sum_lanes(load(scratch.base, scratch.weights + query * LANES)))
    for offset in range(0, head_dim, LANES):
        store(out, out_start + offset, load(scratch.base, scratch.sums + query * head_dim + offset) / total)


@compiled
def attend_pages(
    scratch: Scratch, num_rows: int, group: int, first_seen: Any, last_seen: Any, pages: Pages, slot: int, kv_head: int
) -> None:
    """Takes the pages of a slot, one K/V head of them, into the state of all queries."""
    position, end = first_seen[0], last_seen[0]
    for row in range(1, num_rows):
        position, end = min(position, first_seen[row]), max(end, last_seen[row])
    position -= position % LANES
    if position > end:
        return
    starts = locate(pages, slot, position, kv_head)
    while position <= end:
        next_starts = locate(pages, slot, position + LANES, kv_head) if position + LANES <= end else starts
        chunk = Chunk(
            position, pages.keys, starts[0], pages.page_size, pages.values, starts[1], pages.head_dim, *next_starts
        )
        attend(scratch, num_rows, group, pages.head_dim, first_seen, last_seen, chunk)
        starts = next_starts
        position += LANES
