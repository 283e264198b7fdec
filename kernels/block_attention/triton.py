"""Attention of DSpark draft blocks for GPUs (see `reference.py`): a program a block, K/V head and part of the context.

Where a K/V head has more queries than a program can keep in registers, a few of its heads are a program's, and the
programs beside each other read the same pages.

The grid depends on the number of blocks alone. A block whose slot is negative belongs to nobody and is left out.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attention import (
    SEGMENT,
    add_scores,
    attend_segment,
    dot,
    empty_state,
    load_rotated,
    merge,
    store_part,
    store_result,
)
from kernels.triton.attention_tiles import BLOCK_N, check_ints, heads_of, make_parts, merge_parts

_MAX_QUERIES, _NUM_WARPS = 32, 8
"""Of a program: with 64 queries, or with 4 warps, it spills registers at head_dim 128 (`kernels.aot`)."""


@triton.jit
def attend_block(
    first, second, qkv_ptr, begin, anchor, kv_head, offset, qkv_stride, cos_ptr, sin_ptr, k_norm_ptr, window, eps,
    score_scale, value_type: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_LEN: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEAD: tl.constexpr,
):  # fmt: skip
    """State of a block's own keys and values; offset [M] is each query's place in the block."""
    slot_of, element = tl.arange(0, BLOCK_SLOTS), tl.arange(0, BLOCK_HEAD)
    is_slot = slot_of < BLOCK_LEN
    starts = (begin + slot_of) * qkv_stride + (NUM_HEADS + kv_head) * HEAD_DIM
    first_keys, second_keys = load_rotated(
        qkv_ptr, starts, is_slot, anchor + slot_of, cos_ptr, sin_ptr, k_norm_ptr, eps, HEAD_DIM, BLOCK_HALF
    )
    scores = tl.zeros([BLOCK_M, BLOCK_SLOTS], tl.float32)
    scores = dot(first, tl.trans(first_keys.to(first.dtype)), scores)
    scores = dot(second, tl.trans(second_keys.to(second.dtype)), scores) * score_scale
    distance = offset[:, None] - slot_of[None, :]
    is_visible = is_slot[None, :] & ((window == 0) | (tl.abs(distance) < window))
    scores = tl.where(is_visible, scores, float("-inf"))
    values_ptr = qkv_ptr + starts[:, None] + NUM_KV_HEADS * HEAD_DIM + element[None, :]
    values = tl.load(values_ptr, mask=is_slot[:, None] & (element < HEAD_DIM)[None, :], other=0.0)
    largest, weight, total = empty_state(BLOCK_M, BLOCK_HEAD)
    return add_scores(scores, values.to(value_type), largest, weight, total)


@triton.jit(do_not_specialize=["max_segments", "window"])
def block_attend_kernel(
    qkv_ptr, anchors_ptr, row_slots_ptr, page_table_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, q_norm_ptr,
    k_norm_ptr, out_ptr, parts_ptr, stats_ptr, qkv_stride, out_stride, max_pages, page_stride, max_segments, window,
    eps, score_scale, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    NUM_TILES: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_LEN: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):  # fmt: skip
    """One block, some query heads of one K/V head, every num_parts-th segment; the last part has the block itself."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    block, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    kv_head, tile = tl.program_id(1) // NUM_TILES, tl.program_id(1) % NUM_TILES
    slot = tl.load(row_slots_ptr + block)
    if slot < 0:
        return
    anchor, begin = tl.load(anchors_ptr + block), block * BLOCK_LEN
    query = tl.arange(0, BLOCK_M)
    offset, head_of = query // TILE_HEADS, tile * TILE_HEADS + query % TILE_HEADS
    rows, heads, positions = begin + offset, kv_head * GROUP + head_of, anchor + offset
    is_valid = (offset < BLOCK_LEN) & (head_of < GROUP)
    first_seen = tl.where(window > 0, tl.maximum(positions - window + 1, 0), 0)
    last_seen = anchor - 1 + tl.zeros([BLOCK_M], tl.int32)
    tile_first = tl.min(first_seen, axis=0)
    begin_segment, end_segment = tile_first // SEGMENT + part, (anchor + SEGMENT - 1) // SEGMENT
    has_block = part == tl.num_programs(2) - 1
    if (begin_segment >= end_segment) & (not has_block):
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
    places = (rows * NUM_HEADS + heads) * max_segments
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
            anchor - 1,
            score_scale,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_HALF,
            BLOCK_HEAD,
        )
        if parts_ptr is not None:
            store_part(
                parts_ptr,
                stats_ptr,
                places + segment,
                is_valid,
                own_largest,
                own_weight,
                own_total,
                HEAD_DIM,
                BLOCK_HEAD,
            )
        else:
            largest, weight, total = merge(largest, weight, total, own_largest, own_weight, own_total)
    if has_block:
        own_largest, own_weight, own_total = attend_block(
            first,
            second,
            qkv_ptr,
            begin,
            anchor,
            kv_head,
            offset,
            qkv_stride,
            cos_ptr,
            sin_ptr,
            k_norm_ptr,
            window,
            eps,
            score_scale,
            values_ptr.dtype.element_ty,
            NUM_HEADS,
            NUM_KV_HEADS,
            BLOCK_LEN,
            BLOCK_SLOTS,
            BLOCK_M,
            HEAD_DIM,
            BLOCK_HALF,
            BLOCK_HEAD,
        )
        if parts_ptr is not None:
            store_part(
                parts_ptr,
                stats_ptr,
                places + end_segment,
                is_valid,
                own_largest,
                own_weight,
                own_total,
                HEAD_DIM,
                BLOCK_HEAD,
            )
        else:
            largest, weight, total = merge(largest, weight, total, own_largest, own_weight, own_total)
            offsets = rows * out_stride + heads * HEAD_DIM
            store_result(out_ptr, offsets, is_valid, weight, total, HEAD_DIM, BLOCK_HEAD)


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
    heads = heads_of(out.shape[1], page_table, cos, sin, keys, values)
    check_ints(anchor_positions=anchor_positions, row_slots=row_slots)
    if not len(row_slots):
        return
    parts = make_parts(len(out), heads, page_table)
    block_slots = triton.next_power_of_2(block_len)
    tile_heads = min(heads.group_block, max(1, _MAX_QUERIES // block_slots))
    num_tiles = triton.cdiv(heads.group, tile_heads)
    block_attend_kernel[(len(row_slots), heads.num_kv_heads * num_tiles, parts.num_parts)](
        qkv,
        anchor_positions,
        row_slots,
        page_table,
        cos,
        sin,
        keys,
        values,
        q_norm,
        k_norm,
        out,
        parts.totals,
        parts.stats,
        qkv.stride(0),
        out.stride(0),
        page_table.shape[1],
        keys.stride(0),
        parts.max_segments,
        window,
        eps,
        math.log2(math.e) / math.sqrt(heads.head_dim),
        NUM_HEADS=heads.num_heads,
        NUM_KV_HEADS=heads.num_kv_heads,
        TILE_HEADS=tile_heads,
        NUM_TILES=num_tiles,
        PAGE_SIZE=heads.page_size,
        BLOCK_LEN=block_len,
        BLOCK_SLOTS=max(16, block_slots),
        BLOCK_M=max(16, block_slots * tile_heads),
        BLOCK_N=BLOCK_N,
        **heads.blocks,
        num_warps=_NUM_WARPS,
        num_stages=heads.num_stages(keys.element_size()),
        enable_fp_fusion=False,
    )
    merge_parts(parts, heads, anchor_positions, row_slots, window, out, block_len)
