"""Products of rows with weights stored as 4 or 8 bit levels, for CPUs.

A row is rounded to int8 in groups of 32 inputs, each with a scale s of its own (as llama.cpp does for such weights);
within a group, products and sums are then exact integers:

    out = Σ over groups, in order: d · s · Σ level · x8  +  m · s · Σ x8        (no minimum m with 8 bit levels)

with the weights' scale d and minimum m of the group. A row's result depends on that row alone, at any count of rows,
and on no CPU's choice of instructions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.integers import (
    GROUP,
    HAS_BYTE_PRODUCTS,
    RECORD_BYTES,
    accumulate_each,
    dot_each,
    dot_group_each,
    first_each,
    flip_signs,
    load_levels,
    round_group,
    split_levels,
    store_levels,
    zero_each,
)
from kernels.cpu.jit import compiled, types
from kernels.cpu.native import Kernel, arguments_of, floats, int_arguments, next_item, run_items, scratch
from kernels.cpu.packed import load_as
from kernels.cpu.simd import LANES, prefetch, stack_floats, store_each
from kernels.linear.blocks import COLUMNS, TILE_ROWS, as_bytes, columns_last, over_blocks, run_blocks

_INPUTS = 4
"""Inputs whose levels lie side by side in a lane."""
_LINE, _LINES = 64, GROUP // _INPUTS
"""Bytes read at once, and how often for a group and LANES columns of a byte a level."""
_GROUP_FLOATS = GROUP * COLUMNS // 4
"""Room for a group's levels, a byte each."""
_ROUNDED_ROWS = 8  # by a thread at once
_PARALLEL_INPUTS = 1 << 14
"""Inputs from which a second thread pays when they are rounded."""
_Q4_BYTES, _Q8_BYTES = COLUMNS * (2 + 2 + GROUP // 2), COLUMNS * (2 + GROUP)  # of a block's group
_AHEAD = 1536
"""Bytes between the levels that are multiplied and those that are fetched from memory."""


def pack_q4(levels: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """uint8 levels [N, K] below 16, float16 scales and minimums [N, K / GROUP] to what `Q4` reads.

    For each block of COLUMNS outputs and each group: the columns' scales, their minimums, and for each four inputs the
    columns' levels, those of column i and column i + LANES in the same four bytes.
    """
    lanes = _in_lanes(levels)
    nibbles = lanes[..., :LANES, :] | lanes[..., LANES:, :] << 4
    return torch.cat([as_bytes(columns_last(part)) for part in (scales, minimums)] + [as_bytes(nibbles)], dim=-1)


def pack_q8(levels: Tensor, scales: Tensor) -> Tensor:
    """int8 levels [N, K] and float16 scales [N, K / GROUP] to what `Q8` reads: as `pack_q4`, a byte for a level."""
    return torch.cat([as_bytes(columns_last(scales)), as_bytes(_in_lanes(levels))], dim=-1)


def _in_lanes(levels: Tensor) -> Tensor:
    """[N, K] to [blocks, groups, GROUP / 4, COLUMNS, 4]."""
    num_out, num_in = levels.shape
    return columns_last(levels.view(num_out, num_in // GROUP, GROUP // _INPUTS, _INPUTS)).transpose(-1, -2)


@compiled
def _q4_sums(
    zeros: Any, x: int, row: int, count: int, num_rows: int, num_in: int, weights: int, block: int, sums: int
) -> None:
    half, num_groups = types.int16(0), num_in // GROUP
    store_each(zeros, sums, 0, COLUMNS)
    store_each(zeros, sums, LANES, COLUMNS)
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q4_BYTES
        record = (group * num_rows + row) * RECORD_BYTES
        left, right = zero_each(zeros), zero_each(zeros)
        prefetch(start + _AHEAD, 0)
        prefetch(start + _AHEAD, LANES)
        for line in range(_LINES):
            place = 4 * COLUMNS + line * _LINE
            prefetch(start + _AHEAD + place, 0)
            low, high = split_levels(load_levels(start, place))
            left = dot_each(left, low, 15, x, record + line * _INPUTS, RECORD_BYTES)
            right = dot_each(right, high, 15, x, record + line * _INPUTS, RECORD_BYTES)
        scale, minimum = load_as(half, start, 0), load_as(half, start, 2 * LANES)
        accumulate_each(left, sums, 0, COLUMNS, scale, minimum, x, record, RECORD_BYTES)
        scale, minimum = load_as(half, start, LANES), load_as(half, start, 3 * LANES)
        accumulate_each(right, sums, LANES, COLUMNS, scale, minimum, x, record, RECORD_BYTES)


@compiled
def _q4_tiles(
    zeros: Any, x: int, row: int, count: int, num_rows: int, num_in: int, weights: int, block: int, sums: int
) -> None:
    """Whole tiles. The levels of a group are unpacked once for all of them; sums wait in memory meanwhile."""
    half, num_groups, levels = types.int16(0), num_in // GROUP, stack_floats(_GROUP_FLOATS)
    for tile in range(0, count, TILE_ROWS):
        store_each(zeros, sums, tile * COLUMNS, COLUMNS)
        store_each(zeros, sums, tile * COLUMNS + LANES, COLUMNS)
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q4_BYTES
        prefetch(start + _AHEAD, 0)
        prefetch(start + _AHEAD, LANES)
        for line in range(_LINES):
            place = 4 * COLUMNS + line * _LINE
            prefetch(start + _AHEAD + place, 0)
            low, high = split_levels(load_levels(start, place))
            store_levels(levels, 2 * line * _LINE, low)
            store_levels(levels, (2 * line + 1) * _LINE, high)
        scale, minimum = load_as(half, start, 0), load_as(half, start, 2 * LANES)
        other_scale, other_minimum = load_as(half, start, LANES), load_as(half, start, 3 * LANES)
        for tile in range(0, count, TILE_ROWS):
            record, place = (group * num_rows + row + tile) * RECORD_BYTES, tile * COLUMNS
            left, right = dot_group_each(zero_each(zeros), levels, 15, x, record)
            accumulate_each(left, sums, place, COLUMNS, scale, minimum, x, record, RECORD_BYTES)
            accumulate_each(right, sums, place + LANES, COLUMNS, other_scale, other_minimum, x, record, RECORD_BYTES)


@compiled
def _q8_sums(
    zeros: Any, x: int, row: int, count: int, num_rows: int, num_in: int, weights: int, block: int, sums: int
) -> None:
    half, num_groups = types.int16(0), num_in // GROUP
    store_each(zeros, sums, 0, COLUMNS)
    store_each(zeros, sums, LANES, COLUMNS)
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q8_BYTES
        record = (group * num_rows + row) * RECORD_BYTES
        left = first_each(zeros, x, record, RECORD_BYTES)
        right = left
        prefetch(start + _AHEAD, 0)
        for line in range(_LINES):
            place = 2 * COLUMNS + 2 * line * _LINE
            prefetch(start + _AHEAD + place, 0)
            prefetch(start + _AHEAD + place, LANES)
            levels = flip_signs(load_levels(start, place))
            left = dot_each(left, levels, 255, x, record + line * _INPUTS, RECORD_BYTES)
            levels = flip_signs(load_levels(start, place + _LINE))
            right = dot_each(right, levels, 255, x, record + line * _INPUTS, RECORD_BYTES)
        accumulate_each(left, sums, 0, COLUMNS, load_as(half, start, 0), None, x, record, RECORD_BYTES)
        accumulate_each(right, sums, LANES, COLUMNS, load_as(half, start, LANES), None, x, record, RECORD_BYTES)


@compiled
def _q8_tiles(
    zeros: Any, x: int, row: int, count: int, num_rows: int, num_in: int, weights: int, block: int, sums: int
) -> None:
    """As `_q4_tiles`."""
    half, num_groups, levels = types.int16(0), num_in // GROUP, stack_floats(_GROUP_FLOATS)
    for tile in range(0, count, TILE_ROWS):
        store_each(zeros, sums, tile * COLUMNS, COLUMNS)
        store_each(zeros, sums, tile * COLUMNS + LANES, COLUMNS)
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q8_BYTES
        prefetch(start + _AHEAD, 0)
        for line in range(2 * _LINES):
            place = 2 * COLUMNS + line * _LINE
            prefetch(start + _AHEAD + place, 0)
            store_levels(levels, line * _LINE, flip_signs(load_levels(start, place)))
        scale, other_scale = load_as(half, start, 0), load_as(half, start, LANES)
        for tile in range(0, count, TILE_ROWS):
            record, place = (group * num_rows + row + tile) * RECORD_BYTES, tile * COLUMNS
            left, right = dot_group_each(first_each(zeros, x, record, RECORD_BYTES), levels, 255, x, record)
            accumulate_each(left, sums, place, COLUMNS, scale, None, x, record, RECORD_BYTES)
            accumulate_each(right, sums, place + LANES, COLUMNS, other_scale, None, x, record, RECORD_BYTES)


_run_q4 = over_blocks(_q4_sums, _q4_tiles if HAS_BYTE_PRODUCTS else None)
_run_q8 = over_blocks(_q8_sums, _q8_tiles if HAS_BYTE_PRODUCTS else None)


@compiled
def _round_rows(work: int) -> None:
    source, records, num_rows, num_in = int_arguments(arguments_of(work), 4)
    item = next_item(work)
    while item * _ROUNDED_ROWS < num_rows:
        for row in range(item * _ROUNDED_ROWS, min((item + 1) * _ROUNDED_ROWS, num_rows)):
            for group in range(num_in // GROUP):
                place = records + (group * num_rows + row) * RECORD_BYTES
                round_group(source, row * num_in + group * GROUP, place)
        item = next_item(work)


def _entry_round(arguments: int) -> None:
    _, _, num_rows, num_in = int_arguments(arguments, 4)
    run_items(arguments, num_rows * num_in > _PARALLEL_INPUTS)


def _body_round(work: int) -> None:
    _round_rows(work)


def _entry(arguments: int) -> None:
    run_blocks(arguments)


def _body_q4(work: int) -> None:
    _run_q4(work)


def _body_q8(work: int) -> None:
    _run_q8(work)


_ROUND = Kernel("4q", _entry_round, _body_round)
Q4 = Kernel("7q", _entry, _body_q4)
Q8 = Kernel("7q", _entry, _body_q8)


def linear(kernel: Kernel, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x Wᵀ + b; x [M, K], packed as the kernel reads it, out [M, N]."""
    records = scratch(x.numel() // GROUP * RECORD_BYTES)
    _ROUND(floats(x), records.data_ptr(), *x.shape)
    kernel(records.data_ptr(), packed.data_ptr(), floats(bias), floats(out), *x.shape, out.shape[1])
