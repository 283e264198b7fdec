"""Paged attention for GPUs (see `reference.py`): K/V write, then one program a tile of rows, K/V head and part.

Rows of any mix of prefill chunks, decode and verify windows are told apart by `row_slots` alone: a tile is neighbouring
rows of one slot, which share what they read, and its first row finds that out by itself. Grids depend on the number of
rows, not on what they are, so a captured step runs any mix. A row whose slot is negative belongs to nobody: neither
pages nor `out` are written for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention import (
    SEGMENT,
    attend_segment,
    empty_state,
    load_rotated,
    merge,
    store_part,
    store_result,
)
from kernels.triton.attention_tiles import BLOCK_N, check_ints, heads_of, make_parts, merge_parts
from kernels.triton.page_write import write_kernel


class _Tile(NamedTuple):
    """What a program computes at once, the same at any number of rows, for the same bits."""

    num_queries: int
    """Rows times the query heads of a K/V head."""
    num_positions: int
    num_warps: int


def _tile_of(head_dim: int, element_bytes: int) -> _Tile:
    """None of them spills registers at the shapes of `kernels.aot`: numbers wider than 16 bits need smaller ones."""
    if element_bytes <= 2:
        return _Tile(64, BLOCK_N, 8)
    return _Tile(32, 16, 4) if head_dim > 64 else _Tile(32, BLOCK_N, 8)


@triton.jit
def tile_len(row_slots_ptr, row, slot, BLOCK_ROWS: tl.constexpr):
    """Most rows of the tile that begins with `row`; 0 if none does.

    Rows of a slot are neighbours. Their first BLOCK_ROWS are a tile, so a verify window is one; from there on tiles
    end at multiples of BLOCK_ROWS. So no more than 2 · BLOCK_ROWS slots must be looked at, however long a chunk is.
    """
    back = tl.arange(0, 2 * BLOCK_ROWS)
    slots = tl.load(row_slots_ptr + row - 1 - back, mask=back < row, other=-1)
    num_before = tl.min(tl.where(slots == slot, 2 * BLOCK_ROWS, back), axis=0)
    to_multiple = BLOCK_ROWS - (row % BLOCK_ROWS).to(tl.int32)
    is_second = (num_before == BLOCK_ROWS) | ((num_before > BLOCK_ROWS) & (to_multiple == BLOCK_ROWS))
    return tl.where(num_before == 0, BLOCK_ROWS, tl.where(is_second, to_multiple, 0))


@triton.jit(do_not_specialize=["num_rows", "max_segments", "window"])
def attend_kernel(
    qkv_ptr,
    positions_ptr,
    row_slots_ptr,
    page_table_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    q_norm_ptr,
    out_ptr,
    parts_ptr,
    stats_ptr,
    num_rows,
    qkv_stride,
    out_stride,
    max_pages,
    page_stride,
    max_segments,
    window,
    eps,
    score_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """The rows of one slot that begin at this row, the query heads of one K/V head, every num_parts-th segment."""
    BLOCK_ROWS: tl.constexpr = BLOCK_M // GROUP_BLOCK
    leader, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(row_slots_ptr + leader)
    length = tile_len(row_slots_ptr, leader, slot, BLOCK_ROWS)
    if (slot < 0) | (length == 0):
        return
    query = tl.arange(0, BLOCK_M)
    row_of, head_of = query // GROUP_BLOCK, query % GROUP_BLOCK
    rows, heads = leader + row_of, kv_head * GROUP + head_of
    slots = tl.load(row_slots_ptr + rows, mask=rows < num_rows, other=-1)
    is_row = (slots == slot) & (row_of < length)
    is_valid = is_row & (head_of < GROUP)
    positions = tl.load(positions_ptr + rows, mask=is_row, other=0)
    first_seen = tl.where(window > 0, tl.maximum(positions - window + 1, 0), 0)
    last_seen = tl.where(is_row, positions, -1)
    tile_first = tl.min(tl.where(is_row, first_seen, 2147483647), axis=0)
    tile_last = tl.max(last_seen, axis=0)
    begin_segment, end_segment = tile_first // SEGMENT + part, tile_last // SEGMENT + 1
    if begin_segment >= end_segment:
        return
    first, second = load_rotated(
        qkv_ptr,
        rows * qkv_stride + heads * HEAD_DIM,
        is_valid,
        positions,
        cos_ptr,
        sin_ptr,
        q_norm_ptr,
        eps,
        HEAD_DIM,
        BLOCK_HALF,
    )
    first, second = first.to(keys_ptr.dtype.element_ty), second.to(keys_ptr.dtype.element_ty)
    head_start = kv_head.to(tl.int64) * (HEAD_DIM * PAGE_SIZE)
    largest, weight, total = empty_state(BLOCK_M, BLOCK_HEAD)
    for segment in tl.range(begin_segment, end_segment, tl.num_programs(2)):
        own_largest, own_weight, own_total = attend_segment(
            first,
            second,
            first_seen,
            last_seen,
            page_table_ptr + slot.to(tl.int64) * max_pages,
            keys_ptr + head_start,
            values_ptr + head_start,
            page_stride,
            segment,
            tile_first,
            tile_last,
            score_scale,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_HALF,
            BLOCK_HEAD,
        )
        if parts_ptr is not None:
            places = (rows * NUM_HEADS + heads) * max_segments + segment
            store_part(parts_ptr, stats_ptr, places, is_valid, own_largest, own_weight, own_total, HEAD_DIM, BLOCK_HEAD)
        else:
            largest, weight, total = merge(largest, weight, total, own_largest, own_weight, own_total)
    if parts_ptr is None:
        store_result(out_ptr, rows * out_stride + heads * HEAD_DIM, is_valid, weight, total, HEAD_DIM, BLOCK_HEAD)


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
    """See `reference.write_context`. Rows of `kv` may lie apart; a row whose slot is negative is left out."""
    heads = heads_of(0, page_table, cos, sin, keys, values)
    check_ints(positions=positions, row_slots=row_slots)
    if len(kv):
        write_kernel[(len(kv),)](
            kv,
            positions,
            row_slots,
            page_table,
            cos,
            sin,
            keys,
            values,
            k_norm,
            kv.stride(0),
            page_table.shape[1],
            keys.stride(0),
            eps,
            NUM_KV_HEADS=heads.num_kv_heads,
            PAGE_SIZE=heads.page_size,
            BLOCK_HEADS=triton.next_power_of_2(heads.num_kv_heads),
            **heads.blocks,
            enable_fp_fusion=False,
        )


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
    """See `reference.paged_attention`. Rows of a slot are neighbours; one whose slot is negative is left out."""
    heads = heads_of(out.shape[1], page_table, cos, sin, keys, values)
    write_context(qkv[:, out.shape[1] :], positions, row_slots, page_table, cos, sin, keys, values, k_norm, eps)
    if not len(qkv):
        return
    parts = make_parts(len(qkv), heads, page_table)
    tile = _tile_of(heads.head_dim, keys.element_size())
    attend_kernel[(len(qkv), heads.num_kv_heads, parts.num_parts)](
        qkv,
        positions,
        row_slots,
        page_table,
        cos,
        sin,
        keys,
        values,
        q_norm,
        out,
        parts.totals,
        parts.stats,
        len(qkv),
        qkv.stride(0),
        out.stride(0),
        page_table.shape[1],
        keys.stride(0),
        parts.max_segments,
        window,
        eps,
        math.log2(math.e) / math.sqrt(heads.head_dim),
        NUM_HEADS=heads.num_heads,
        GROUP=heads.group,
        GROUP_BLOCK=heads.group_block,
        PAGE_SIZE=heads.page_size,
        BLOCK_M=max(tile.num_queries, heads.group_block),
        BLOCK_N=tile.num_positions,
        **heads.blocks,
        num_warps=tile.num_warps,
        num_stages=heads.num_stages(keys.element_size()),
        enable_fp_fusion=False,
    )
    merge_parts(parts, heads, positions, row_slots, window, out)
