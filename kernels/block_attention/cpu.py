"""Attention of DSpark draft blocks for CPUs (see `reference.py`): one pass over the pages of each (block, K/V head)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kernels.cpu.jit import types
from kernels.cpu.native import (
    Kernel,
    arguments_of,
    float_argument,
    floats,
    int_arguments,
    ints,
    keep,
    next_item,
    run_items,
)
from kernels.cpu.pages import Pages, pages_of, query_factor, rotate_head
from kernels.cpu.running_softmax import (
    CHUNK,
    PARALLEL_WORK,
    SEGMENT,
    Chunk,
    attend,
    attend_pages,
    finish,
    make_queries,
    make_state,
    merge,
    next_line,
    queries_size,
    state_size,
)
from kernels.cpu.simd import LANES, load_int


def _entry(arguments: int) -> None:
    numbers = int_arguments(arguments, 20)
    num_blocks, num_heads, anchors, block_len, head_dim = numbers[1], numbers[2], numbers[3], numbers[9], numbers[17]
    context_len = block_len * num_blocks
    for block in range(num_blocks):
        context_len += load_int(anchors, block)
    run_items(arguments, context_len * block_len * num_heads * head_dim > PARALLEL_WORK)


def _body(work: int) -> None:
    arguments = arguments_of(work)
    numbers, eps = int_arguments(arguments, 20), float_argument(arguments, 20)
    qkv, num_blocks, num_heads, anchors, row_slots, q_norm, k_norm, window, out, block_len = numbers[:10]
    pages = Pages(*numbers[10:])
    head_dim, group = pages.head_dim, num_heads // pages.num_kv_heads
    row_size = (num_heads + 2 * pages.num_kv_heads) * head_dim
    num_queries = block_len * group
    size, states = state_size(num_queries, head_dim), queries_size(num_queries, head_dim)
    memory = np.empty(LANES + states + 2 * size, np.float32)
    base = next_line(memory.ctypes.data)
    rotated = np.empty(head_dim, np.float32)
    lanes = (block_len + LANES - 1) // LANES * LANES
    block_keys = np.zeros(head_dim * lanes, np.float32)
    first_seen, last_seen = np.empty(block_len, np.int64), np.empty(block_len, np.int64)
    item = next_item(work)
    while item < num_blocks * pages.num_kv_heads:
        block, kv_head = item // pages.num_kv_heads, item % pages.num_kv_heads
        anchor, slot = types.int64(load_int(anchors, block)), types.int64(load_int(row_slots, block))
        begin = block * block_len
        queries = make_queries(base, block_len, group, head_dim)
        for row in range(block_len):
            position = anchor + row
            first_seen[row] = max(0, position - window + 1) if window > 0 else 0
            last_seen[row] = anchor - 1
            for head in range(group):
                source = (begin + row) * row_size + (kv_head * group + head) * head_dim
                target = queries.queries + (row * group + head) * head_dim
                rotate_head(qkv, source, position, pages, q_norm, eps, query_factor(head_dim), base, target)
            source = (begin + row) * row_size + (num_heads + kv_head) * head_dim
            rotate_head(qkv, source, position, pages, k_norm, eps, 1.0, rotated.ctypes.data, 0)
            for element in range(head_dim):
                block_keys[element * lanes + row] = rotated[element]
        total = make_state(base, states, num_queries, head_dim)
        first = first_seen[0] // SEGMENT * SEGMENT
        attend_pages(queries, total, first_seen, last_seen, pages, slot, kv_head, first, first + SEGMENT)
        for start in range(first + SEGMENT, anchor, SEGMENT):
            own = make_state(base, states + size, num_queries, head_dim)
            attend_pages(queries, own, first_seen, last_seen, pages, slot, kv_head, start, start + SEGMENT)
            merge(total, own, num_queries, head_dim)
        for row in range(block_len):
            last_seen[row] = anchor + (block_len if window == 0 else min(block_len, row + window)) - 1
        own = make_state(base, states + size, num_queries, head_dim)
        for offset in range(0, block_len, CHUNK):
            value_start = (begin + offset) * row_size + (num_heads + pages.num_kv_heads + kv_head) * head_dim
            count = min(block_len - offset, CHUNK)
            last = (count - 1) // LANES * LANES  # vectors beyond the block repeat its last
            two, three, four = min(LANES, last), min(2 * LANES, last), min(3 * LANES, last)
            chunk = Chunk(
                anchor + offset,
                0,
                count,
                types.int64(block_keys.ctypes.data),
                (offset, offset + two, offset + three, offset + four),
                lanes,
                qkv,
                (
                    value_start,
                    value_start + two * row_size,
                    value_start + three * row_size,
                    value_start + four * row_size,
                ),
                row_size,
                0,
            )
            attend(queries, own, first_seen, last_seen, chunk, chunk)
        merge(total, own, num_queries, head_dim)
        for row in range(block_len):
            for head in range(group):
                target = ((begin + row) * num_heads + kv_head * group + head) * head_dim
                finish(total, row * group + head, head_dim, out, target)
        item = next_item(work)
    keep(memory)


BLOCK = Kernel("20qd", _entry, _body)


def block_attention(
    qkv: Tensor,
    anchor_positions: Tensor,
    row_slots: Tensor,
    block_len: int,
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
    """See `reference.block_attention`."""
    pages = pages_of(page_table, cos, sin, keys, values)
    BLOCK(
        floats(qkv),
        len(anchor_positions),
        out.shape[1] // pages.head_dim,
        ints(anchor_positions),
        ints(row_slots),
        floats(q_norm),
        floats(k_norm),
        window,
        floats(out),
        block_len,
        *pages,
        eps,
    )
