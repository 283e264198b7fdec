"""Parts of the attention kernels: heads in, a running softmax over pages, one result a row.

The context of a row is cut into segments of SEGMENT positions, always at the same positions. Each has a softmax of its
own (running over blocks of positions); the segments' states are merged in order, in registers or from memory. Results
are the same bits either way, and a segment or block that a row does not see changes nothing of it. So a row depends
neither on the rows beside it nor on how many programs share its context. Fusing of products and sums is written out
(`tl.fma`) and otherwise off, as the compiler may choose differently in two kernels.

Pages as in `kernels/paged_attention/reference.py`. A page's K of one head is [D, page_size]: 16 neighbouring positions
are one vector. A head's halves are operands of their own: RoPE turns one against the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEGMENT: tl.constexpr = tl.constexpr(256)
"""Positions of a segment."""
_IS_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total):
    """a @ b + total, summed in float32; float32 operands are not rounded."""
    if _IS_INTERPRETED:  # the interpreter multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def load_rotated(
    rows_ptr, offsets, is_valid, positions, cos_ptr, sin_ptr, norm_ptr, eps, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Heads that start at element offsets [M], normalised (unless norm_ptr is None) and rotated: halves [M, BLOCK].

    float32; 0 where is_valid [M] is not or past the half head.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    element = tl.arange(0, BLOCK)
    mask = is_valid[:, None] & (element < HALF)[None, :]
    heads_ptr = rows_ptr + offsets[:, None] + element[None, :]
    first = tl.load(heads_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        norm_first = tl.load(norm_ptr + element, mask=element < HALF, other=0.0).to(tl.float32)
        norm_second = tl.load(norm_ptr + HALF + element, mask=element < HALF, other=0.0).to(tl.float32)
        first, second = first * scale * norm_first[None, :], second * scale * norm_second[None, :]
    angles = positions.to(tl.int64)[:, None] * HALF + element[None, :]
    cos = tl.load(cos_ptr + angles, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angles, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_HEAD: tl.constexpr):
    """Of each query: the largest score (base 2), the sum of weights relative to it, the weighted sum of values."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return largest, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_HEAD], tl.float32)


@triton.jit
def finite(largest):
    """A number to subtract: 0 in place of the -inf of a query that has seen nothing."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def add_scores(scores, values, largest, weight, total):
    """A state after scores [M, N], -inf where a query does not see, and finite values [N, BLOCK_HEAD]."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    base = finite(new_largest)
    keep = tl.exp2(largest - base)
    weights = tl.exp2(scores - base[:, None])
    weight = tl.fma(weight, keep, tl.sum(weights, axis=1))
    return new_largest, weight, dot(weights.to(values.dtype), values, total * keep[:, None])


@triton.jit
def merge(largest, weight, total, other_largest, other_weight, other_total):
    """The state of two segments; an empty one leaves the other's bits as they are."""
    new_largest = tl.maximum(largest, other_largest)
    base = finite(new_largest)
    keep, gain = tl.exp2(largest - base), tl.exp2(other_largest - base)
    weight = tl.fma(weight, keep, other_weight * gain)
    return new_largest, weight, tl.fma(total, keep[:, None], other_total * gain[:, None])


@triton.jit
def attend_segment(
    first,
    second,
    first_seen,
    last_seen,
    pages_ptr,
    keys_ptr,
    values_ptr,
    page_stride,
    segment,
    tile_first,
    tile_last,
    score_scale,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """State of one segment for queries, halves [M, BLOCK_HALF] in the keys' type.

    Query i sees positions first_seen[i] ... last_seen[i]; nothing outside tile_first ... tile_last is read but whole
    blocks of K. pages_ptr is the slot's row of the page table, keys_ptr and values_ptr this head's part of page 0.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    half_element, element = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_HEAD)
    largest, weight, total = empty_state(BLOCK_M, BLOCK_HEAD)
    begin = tl.maximum(segment * SEGMENT, tile_first // BLOCK_N * BLOCK_N)
    end = tl.minimum(segment * SEGMENT + SEGMENT, tile_last + 1)
    for start in tl.range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        is_seen = (positions >= tile_first) & (positions <= tile_last)
        pages = tl.load(pages_ptr + positions // PAGE_SIZE, mask=is_seen, other=0).to(tl.int64) * page_stride
        entries = positions % PAGE_SIZE
        key_places = pages[None, :] + (half_element[:, None] * PAGE_SIZE + entries[None, :])
        key_places = tl.max_contiguous(tl.multiple_of(key_places, (1, 16)), (1, 16))
        in_half = (half_element < HALF)[:, None]
        first_keys = tl.load(keys_ptr + key_places, mask=in_half, other=0.0)
        second_keys = tl.load(keys_ptr + HALF * PAGE_SIZE + key_places, mask=in_half, other=0.0)
        scores = dot(first, first_keys, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        scores = dot(second, second_keys, scores) * score_scale
        is_visible = (positions[None, :] >= first_seen[:, None]) & (positions[None, :] <= last_seen[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        value_places = pages[:, None] + (entries[:, None] * HEAD_DIM + element[None, :])
        in_head = is_seen[:, None] & (element < HEAD_DIM)[None, :]
        values = tl.load(values_ptr + value_places, mask=in_head, other=0.0)
        largest, weight, total = add_scores(scores, values, largest, weight, total)
    return largest, weight, total


@triton.jit
def store_part(
    parts_ptr,
    stats_ptr,
    places,
    is_valid,
    largest,
    weight,
    total,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """Keeps states of queries for `merge_parts_kernel`; places [M] count states."""
    element = tl.arange(0, BLOCK_HEAD)
    tl.store(stats_ptr + places * 2, largest, mask=is_valid)
    tl.store(stats_ptr + places * 2 + 1, weight, mask=is_valid)
    mask = is_valid[:, None] & (element < HEAD_DIM)[None, :]
    tl.store(parts_ptr + places[:, None] * HEAD_DIM + element[None, :], total, mask=mask)


@triton.jit
def store_result(out_ptr, offsets, is_valid, weight, total, HEAD_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr):
    """Writes results of queries to element offsets [M]."""
    element = tl.arange(0, BLOCK_HEAD)
    mask = is_valid[:, None] & (element < HEAD_DIM)[None, :]
    result = total / tl.where(is_valid, weight, 1.0)[:, None]
    tl.store(out_ptr + offsets[:, None] + element[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_segments", "window"])
def merge_parts_kernel(
    parts_ptr,
    stats_ptr,
    positions_ptr,
    row_slots_ptr,
    out_ptr,
    out_stride,
    window,
    max_segments,
    BLOCK_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
):
    """A row and head a program: its segments' states, [rows, heads, max_segments], merged in order.

    BLOCK_LEN is 0 for rows with positions and slots of their own; else rows are those of draft blocks, BLOCK_LEN each,
    and their last segment is the block.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if BLOCK_LEN == 0:
        slot, position = tl.load(row_slots_ptr + row), tl.load(positions_ptr + row)
        end_segment = position // SEGMENT + 1
    else:
        slot, anchor = tl.load(row_slots_ptr + row // BLOCK_LEN), tl.load(positions_ptr + row // BLOCK_LEN)
        position = anchor + (row % BLOCK_LEN).to(tl.int32)
        end_segment = (anchor + SEGMENT - 1) // SEGMENT + 1
    if slot < 0:
        return
    first_segment = tl.where(window > 0, tl.maximum(position - window + 1, 0) // SEGMENT, 0)
    if BLOCK_LEN > 0:
        first_segment = tl.minimum(first_segment, end_segment - 1)
    place = (row * tl.num_programs(1) + head) * max_segments
    element = tl.arange(0, BLOCK_HEAD)
    largest, weight, total = empty_state(1, BLOCK_HEAD)
    for segment in tl.range(first_segment, end_segment):
        places = place + segment + tl.zeros([1], tl.int64)
        own_largest, own_weight = tl.load(stats_ptr + places * 2), tl.load(stats_ptr + places * 2 + 1)
        own_places = places[:, None] * HEAD_DIM + element[None, :]
        own = tl.load(parts_ptr + own_places, mask=(element < HEAD_DIM)[None, :], other=0.0)
        largest, weight, total = merge(largest, weight, total, own_largest, own_weight, own)
    offsets = row * out_stride + head * HEAD_DIM + tl.zeros([1], tl.int64)
    store_result(out_ptr, offsets, tl.full([1], 1, tl.int1), weight, total, HEAD_DIM, BLOCK_HEAD)
