"""K (normalised, rotated) and V of rows to their pages, laid out as in `kernels/paged_attention/reference.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention import load_rotated


@triton.jit
def write_kernel(
    kv_ptr,
    positions_ptr,
    row_slots_ptr,
    page_table_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    k_norm_ptr,
    kv_stride,
    max_pages,
    page_stride,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """K (normalised, rotated) and V of one row to its page; kv_ptr points at the keys of row 0."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row)
    if slot < 0:
        return
    position = tl.load(positions_ptr + row)
    page = tl.load(page_table_ptr + slot.to(tl.int64) * max_pages + position // PAGE_SIZE).to(tl.int64)
    entry, page_start = position % PAGE_SIZE, page * page_stride
    head, half_element, element = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_HEAD)
    is_head = head < NUM_KV_HEADS
    first, second = load_rotated(
        kv_ptr,
        row * kv_stride + head * HEAD_DIM,
        is_head,
        position + tl.zeros([BLOCK_HEADS], tl.int32),
        cos_ptr,
        sin_ptr,
        k_norm_ptr,
        eps,
        HEAD_DIM,
        BLOCK_HALF,
    )
    page_heads = page_start + head[:, None] * (HEAD_DIM * PAGE_SIZE)
    mask = is_head[:, None] & (half_element < HEAD_DIM // 2)[None, :]
    key_ptr = keys_ptr + page_heads + half_element[None, :] * PAGE_SIZE + entry
    tl.store(key_ptr, first.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(key_ptr + HEAD_DIM // 2 * PAGE_SIZE, second.to(keys_ptr.dtype.element_ty), mask=mask)
    mask = is_head[:, None] & (element < HEAD_DIM)[None, :]
    source = row * kv_stride + (NUM_KV_HEADS + head[:, None]) * HEAD_DIM + element[None, :]
    value = tl.load(kv_ptr + source, mask=mask)
    value_ptr = values_ptr + page_heads + entry * HEAD_DIM + element[None, :]
    tl.store(value_ptr, value.to(values_ptr.dtype.element_ty), mask=mask)
