"""Paged attention for CPUs (see `reference.py`): one pass over the pages of each (rows of a slot, K/V head).

head_dim and page_size are multiples of 16, the lanes of `kernels.cpu.simd`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from kernels.cpu.jit import compiled, types
from kernels.cpu.native import Kernel, arguments_of, float_argument, floats, int_arguments, ints, next_item, run_items
from kernels.cpu.pages import Pages, locate, pages_of, query_factor, rotate_head
from kernels.cpu.running_softmax import PARALLEL_WORK, attend_pages, finish, make_scratch, scratch_size
from kernels.cpu.simd import LANES, load, load_int, store, store_float

_TILE = 8
"""Rows of a slot that share each page they read."""


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
    """K and V of rows, found from element `start` of each, to their pages."""
    rotated = np.empty(pages.head_dim, np.float32)
    for row in range(num_rows):
        position, slot = types.int64(load_int(positions, row)), types.int64(load_int(row_slots, row))
        for head in range(pages.num_kv_heads):
            source = row * row_size + start + head * pages.head_dim
            rotate_head(rows, source, position, pages, norm, eps, 1.0, rotated.ctypes.data, 0)
            key_start, value_start = locate(pages, slot, position, head)
            for element in range(pages.head_dim):
                store_float(pages.keys, key_start + element * pages.page_size, rotated[element])
            source += pages.num_kv_heads * pages.head_dim
            for offset in range(0, pages.head_dim, LANES):
                store(pages.values, value_start + offset, load(rows, source + offset))


def _write_entry(arguments: int) -> None:
    numbers, eps = int_arguments(arguments, 14), float_argument(arguments, 14)
    kv, num_rows, positions, row_slots, k_norm = numbers[:5]
    pages = Pages(*numbers[5:])
    _write(kv, 2 * pages.num_kv_heads * pages.head_dim, 0, num_rows, positions, row_slots, k_norm, eps, pages)


def _attend_entry(arguments: int) -> None:
    numbers, eps = int_arguments(arguments, 18), float_argument(arguments, 18)
    qkv, num_rows, num_heads, positions, row_slots, k_norm = numbers[:6]
    pages = Pages(*numbers[9:])
    start = num_heads * pages.head_dim
    row_size = start + 2 * pages.num_kv_heads * pages.head_dim
    _write(qkv, row_size, start, num_rows, positions, row_slots, k_norm, eps, pages)
    num_positions = 0
    for row in range(num_rows):
        num_positions += load_int(positions, row) + 1
    run_items(arguments, num_positions * start > PARALLEL_WORK)


@compiled
def _tile_end(row_slots: int, begin: int, num_rows: int) -> int:
    end = begin
    while end < min(begin + _TILE, num_rows) and load_int(row_slots, end) == load_int(row_slots, begin):
        end += 1
    return end


def _attend_body(work: int) -> None:
    arguments = arguments_of(work)
    numbers, eps = int_arguments(arguments, 18), float_argument(arguments, 18)
    qkv, num_rows, num_heads, positions, row_slots, _, q_norm, window, out = numbers[:9]
    pages = Pages(*numbers[9:])
    head_dim, group = pages.head_dim, num_heads // pages.num_kv_heads
    row_size = (num_heads + 2 * pages.num_kv_heads) * head_dim
    memory = np.empty(scratch_size(_TILE * group, head_dim), np.float32)
    first_seen, last_seen = np.empty(_TILE, np.int64), np.empty(_TILE, np.int64)
    tile, begin, item = 0, 0, next_item(work)
    while True:
        while tile < item // pages.num_kv_heads and begin < num_rows:
            begin = _tile_end(row_slots, begin, num_rows)
            tile += 1
        if begin >= num_rows:
            return
        kv_head, slot = item % pages.num_kv_heads, types.int64(load_int(row_slots, begin))
        tile_rows = _tile_end(row_slots, begin, num_rows) - begin
        scratch = make_scratch(memory.ctypes.data, tile_rows * group, head_dim)
        for row in range(tile_rows):
            position = types.int64(load_int(positions, begin + row))
            first_seen[row] = max(0, position - window + 1) if window > 0 else 0
            last_seen[row] = position
            for head in range(group):
                source = (begin + row) * row_size + (kv_head * group + head) * head_dim
                target = scratch.queries + (row * group + head) * head_dim
                factor = query_factor(head_dim)
                rotate_head(qkv, source, position, pages, q_norm, eps, factor, scratch.base, target)
        attend_pages(scratch, tile_rows, group, first_seen, last_seen, pages, slot, kv_head)
        for row in range(tile_rows):
            for head in range(group):
                target = ((begin + row) * num_heads + kv_head * group + head) * head_dim
                finish(scratch, row * group + head, head_dim, out, target)
        item = next_item(work)


WRITE = Kernel("14qd", _write_entry)
ATTEND = Kernel("18qd", _attend_entry, _attend_body)


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
