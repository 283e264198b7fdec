"""Paged attention for CPUs (see `reference.py`): one pass over the pages of each (rows of a slot, K/V head).

Rows are taken in tiles that share every page they read. Few tiles are cut into segments of their context, so that
every thread has work; `kernels.cpu.running_softmax` gives the same bits either way.
head_dim and page_size are multiples of 16, the lanes of `kernels.cpu.simd`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.jit import compiled, types
from kernels.cpu.native import (
    Kernel,
    arguments_of,
    float_argument,
    floats,
    int_arguments,
    ints,
    keep,
    next_item,
    run_items_of,
)
from kernels.cpu.packed import copy_half, store_halves
from kernels.cpu.pages import Pages, locate, pages_of, query_factor, rotate_head
from kernels.cpu.pool import add_to_word, load_word
from kernels.cpu.running_softmax import (
    PARALLEL_WORK,
    SEGMENT,
    attend_pages,
    finish,
    make_queries,
    make_state,
    merge,
    next_line,
    queries_size,
    state_at,
    state_size,
)
from kernels.cpu.simd import LANES, load, load_int, store, store_float

_TILE = 16
"""Rows of a slot that share each page they read."""
_MIN_ITEMS = 16
"""Work items below which tiles are cut into segments."""
_HEAD, _TILE_WORDS = 4, 3
"""A plan is int64: its kernel's arguments, the number of tiles, whether they are cut, and the address of the segments'
states; of each tile its first row, item and state element (and what would be those of one more tile); for each tile
and K/V head the segments that are not done."""


@compiled
def _write(
    rows: int,
    row_size: int,
    start: int,
    num_rows: int,
    positions: int,
    row_slots: int,
    norm: int,
    eps: float,
    pages: Any,
) -> None:
    """K and V of rows, found from element `start` of each, to their pages, in the pages' type."""
    rotated, narrow = np.empty(pages.head_dim, np.float32), np.empty(pages.head_dim, np.int16)
    for row in range(num_rows):
        position, slot = types.int64(load_int(positions, row)), types.int64(load_int(row_slots, row))
        for head in range(pages.num_kv_heads):
            source = row * row_size + start + head * pages.head_dim
            rotate_head(rows, source, position, pages, norm, eps, 1.0, rotated.ctypes.data, 0)
            key_start, value_start = locate(pages, slot, position, head)
            value_source = source + pages.num_kv_heads * pages.head_dim
            if pages.is_half:
                for offset in range(0, pages.head_dim, LANES):
                    store_halves(narrow.ctypes.data, offset, load(rotated.ctypes.data, offset))
                    store_halves(pages.values, value_start + offset, load(rows, value_source + offset))
                for element in range(pages.head_dim):
                    copy_half(narrow.ctypes.data, element, pages.keys, key_start + element * pages.page_size)
            else:
                for element in range(pages.head_dim):
                    store_float(pages.keys, key_start + element * pages.page_size, rotated[element])
                for offset in range(0, pages.head_dim, LANES):
                    store(pages.values, value_start + offset, load(rows, value_source + offset))


def _write_entry(arguments: int) -> None:
    numbers, eps = int_arguments(arguments, 15), float_argument(arguments, 15)
    kv, num_rows, positions, row_slots, k_norm = numbers[:5]
    pages = Pages(*numbers[5:])
    _write(kv, 2 * pages.num_kv_heads * pages.head_dim, 0, num_rows, positions, row_slots, k_norm, eps, pages)


@compiled
def _tile_end(row_slots: int, begin: int, num_rows: int) -> int:
    end = begin
    while end < min(begin + _TILE, num_rows) and load_int(row_slots, end) == load_int(row_slots, begin):
        end += 1
    return end


@compiled
def _segments(positions: int, window: int, begin: int, end: int) -> tuple[int, int]:
    """First segment that rows begin … end - 1 see, and the one after the last."""
    first = last = types.int64(load_int(positions, begin))
    for row in range(begin + 1, end):
        position = types.int64(load_int(positions, row))
        first, last = min(first, position), max(last, position)
    return (max(0, first - window + 1) // SEGMENT if window > 0 else 0), last // SEGMENT + 1


@compiled
def _plan_tiles(
    plan: Any, positions: int, row_slots: int, num_rows: int, window: int, pages: Pages, group: int
) -> None:
    """Fills in all of a plan but the addresses."""
    num_tiles, begin = 0, 0
    while begin < num_rows:
        begin = _tile_end(row_slots, begin, num_rows)
        num_tiles += 1
    is_cut = num_tiles * pages.num_kv_heads < _MIN_ITEMS
    begin, item, state, place = 0, 0, 0, _HEAD
    counters = _HEAD + (num_tiles + 1) * _TILE_WORDS
    for _ in range(num_tiles):
        plan[place], plan[place + 1], plan[place + 2] = begin, item, state
        end = _tile_end(row_slots, begin, num_rows)
        first_segment, end_segment = _segments(positions, window, begin, end)
        parts = end_segment - first_segment if is_cut else 1
        if is_cut:
            state += pages.num_kv_heads * parts * state_size((end - begin) * group, pages.head_dim)
        for _ in range(pages.num_kv_heads):
            plan[counters] = parts
            counters += 1
        begin, item, place = end, item + parts * pages.num_kv_heads, place + _TILE_WORDS
    plan[place], plan[place + 1], plan[place + 2] = begin, item, state
    plan[1], plan[2] = num_tiles, is_cut


def _attend_entry(arguments: int) -> None:
    numbers, eps = int_arguments(arguments, 19), float_argument(arguments, 19)
    qkv, num_rows, num_heads, positions, row_slots, k_norm, _, window, _ = numbers[:9]
    pages = Pages(*numbers[9:])
    start = num_heads * pages.head_dim
    row_size = start + 2 * pages.num_kv_heads * pages.head_dim
    _write(qkv, row_size, start, num_rows, positions, row_slots, k_norm, eps, pages)
    plan = np.empty(_HEAD + (num_rows + 1) * (_TILE_WORDS + pages.num_kv_heads), np.int64)
    _plan_tiles(plan, positions, row_slots, num_rows, window, pages, num_heads // pages.num_kv_heads)
    states = np.empty(plan[_HEAD + plan[1] * _TILE_WORDS + 2], np.float32)
    plan[0], plan[3] = arguments, states.ctypes.data
    num_positions = 0
    for row in range(num_rows):
        num_positions += load_int(positions, row) + 1
    run_items_of(plan.ctypes.data, arguments, num_positions * start > PARALLEL_WORK)
    keep(plan)
    keep(states)


def _attend_body(work: int) -> None:
    plan = arguments_of(work)
    arguments, num_tiles, is_cut, states = (
        load_word(plan),
        load_word(plan + 8),
        load_word(plan + 16),
        load_word(plan + 24),
    )
    numbers, eps = int_arguments(arguments, 19), float_argument(arguments, 19)
    qkv, _, num_heads, positions, row_slots, _, q_norm, window, out = numbers[:9]
    pages = Pages(*numbers[9:])
    head_dim, group = pages.head_dim, num_heads // pages.num_kv_heads
    row_size = (num_heads + 2 * pages.num_kv_heads) * head_dim
    tile_state_size = state_size(_TILE * group, head_dim)
    memory = np.empty(LANES + queries_size(_TILE * group, head_dim) + 2 * tile_state_size, np.float32)
    first_seen, last_seen = np.empty(_TILE, np.int64), np.empty(_TILE, np.int64)
    base, tile_states = next_line(memory.ctypes.data), queries_size(_TILE * group, head_dim)
    tile, item = plan + 8 * _HEAD, next_item(work)
    counters = tile + 8 * (num_tiles + 1) * _TILE_WORDS
    while item < load_word(plan + 8 * (_HEAD + num_tiles * _TILE_WORDS + 1)):
        while load_word(tile + 8 * (_TILE_WORDS + 1)) <= item:
            tile += 8 * _TILE_WORDS
            counters += 8 * pages.num_kv_heads
        begin, end = load_word(tile), load_word(tile + 8 * _TILE_WORDS)
        num_queries, slot = (end - begin) * group, types.int64(load_int(row_slots, begin))
        first_segment, end_segment = _segments(positions, window, begin, end)
        num_parts = end_segment - first_segment if is_cut else 1
        index = item - load_word(tile + 8)
        kv_head, part = index // num_parts, index % num_parts
        queries = make_queries(base, end - begin, group, head_dim)
        for row in range(begin, end):
            position = types.int64(load_int(positions, row))
            first_seen[row - begin] = max(0, position - window + 1) if window > 0 else 0
            last_seen[row - begin] = position
            for head in range(group):
                source = row * row_size + (kv_head * group + head) * head_dim
                target = queries.queries + ((row - begin) * group + head) * head_dim
                rotate_head(qkv, source, position, pages, q_norm, eps, query_factor(head_dim), base, target)
        seen = (first_seen, last_seen, pages, slot, kv_head)
        size = state_size(num_queries, head_dim)
        parts = load_word(tile + 16) + kv_head * num_parts * size
        if is_cut:
            first_segment += part
            end_segment = first_segment + 1
            total = make_state(states, parts + part * size, num_queries, head_dim)
        else:
            total = make_state(base, tile_states, num_queries, head_dim)
        attend_pages(queries, total, *seen, first_segment * SEGMENT, first_segment * SEGMENT + SEGMENT)
        for segment in range(first_segment + 1, end_segment):
            own = make_state(base, tile_states + tile_state_size, num_queries, head_dim)
            attend_pages(queries, own, *seen, segment * SEGMENT, segment * SEGMENT + SEGMENT)
            merge(total, own, num_queries, head_dim)
        is_last = not is_cut or add_to_word(counters + 8 * kv_head, -1) == 1
        if is_cut and is_last:
            total = state_at(states, parts, num_queries, head_dim)
            for other in range(1, num_parts):
                merge(total, state_at(states, parts + other * size, num_queries, head_dim), num_queries, head_dim)
        if is_last:
            for row in range(begin, end):
                for head in range(group):
                    target = (row * num_heads + kv_head * group + head) * head_dim
                    finish(total, (row - begin) * group + head, head_dim, out, target)
        item = next_item(work)
    keep(memory)


WRITE = Kernel("15qd", _write_entry)
ATTEND = Kernel("19qd", _attend_entry, _attend_body)


def write_context(
    kv: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """See `reference.write_context`."""
    pages = pages_of(page_table, cos, sin, keys, values)
    WRITE(floats(kv), kv.shape[0], ints(positions), ints(row_slots), floats(k_norm), *pages, eps)


def paged_attention(
    qkv: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    window: int,
    out: Tensor,
) -> None:
    """See `reference.paged_attention`."""
    pages = pages_of(page_table, cos, sin, keys, values)
    num_rows, width = out.shape
    rows = floats(qkv), num_rows, width // pages.head_dim, ints(positions), ints(row_slots)
    ATTEND(*rows, floats(k_norm), floats(q_norm), window, floats(out), *pages, eps)
