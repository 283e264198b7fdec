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
    RECORD_BYTES,
    accumulate_each,
    dot_each,
    first_each,
    flip_signs,
    load_levels,
    round_group,
    split_levels,
    zero_each,
)
from kernels.cpu.jit import compiled, types
from kernels.cpu.native import Kernel, floats, int_arguments, scratch
from kernels.cpu.packed import load_as
from kernels.cpu.simd import LANES, prefetch, store_each
from kernels.linear.blocks import COLUMNS, as_bytes, columns_last, over_blocks, run_blocks

_INPUTS = 4
"""Inputs whose levels lie side by side in a lane."""
_LINE = 64
"""Bytes read at once."""
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
def _q4_sums(zeros: Any, x: int, row: int, num_in: int, weights: int, block: int, sums: int) -> None:
    half, num_groups = types.int16(0), num_in // GROUP
    stride = num_groups * RECORD_BYTES
    store_each(zeros, sums, 0, COLUMNS)
    store_each(zeros, sums, LANES, COLUMNS)
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q4_BYTES
        record = row * stride + group * RECORD_BYTES
        left, right = zero_each(zeros), zero_each(zeros)
        prefetch(start + _AHEAD, 0)
        prefetch(start + _AHEAD, LANES)
        for line in range(GROUP // _INPUTS):
            place = 4 * COLUMNS + line * _LINE
            prefetch(start + _AHEAD + place, 0)
            low, high = split_levels(load_levels(start, place))
            left = dot_each(left, low, 15, x, record + line * _INPUTS, stride)
            right = dot_each(right, high, 15, x, record + line * _INPUTS, stride)
        scale, minimum = load_as(half, start, 0), load_as(half, start, 2 * LANES)
        accumulate_each(left, sums, 0, COLUMNS, scale, minimum, x, record, stride)
        scale, minimum = load_as(half, start, LANES), load_as(half, start, 3 * LANES)
        accumulate_each(right, sums, LANES, COLUMNS, scale, minimum, x, record, stride)


@compiled
def _q8_sums(zeros: Any, x: int, row: int, num_in: int, weights: int, block: int, sums: int) -> None:
    half, num_groups = types.int16(0), num_in // GROUP
    stride = num_groups * RECORD_BYTES
    store_each(zeros, sums, 0, COLUMNS)
    store_each(zeros, sums, LANES, COLUMNS)
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q8_BYTES
        record = row * stride + group * RECORD_BYTES
        left = first_each(zeros, x, record, stride)
        right = left
        prefetch(start + _AHEAD, 0)
        for line in range(GROUP // _INPUTS):
            place = 2 * COLUMNS + 2 * line * _LINE
            prefetch(start + _AHEAD + place, 0)
            prefetch(start + _AHEAD + place, LANES)
            levels = flip_signs(load_levels(start, place))
            left = dot_each(left, levels, 255, x, record + line * _INPUTS, stride)
            levels = flip_signs(load_levels(start, place + _LINE))
            right = dot_each(right, levels, 255, x, record + line * _INPUTS, stride)
        accumulate_each(left, sums, 0, COLUMNS, load_as(half, start, 0), None, x, record, stride)
        accumulate_each(right, sums, LANES, COLUMNS, load_as(half, start, LANES), None, x, record, stride)


_run_q4, _run_q8 = over_blocks(_q4_sums), over_blocks(_q8_sums)


def _entry(arguments: int) -> None:
    x, _, _, _, num_rows, num_in, _, source = int_arguments(arguments, 8)
    for group in range(num_rows * num_in // GROUP):
        round_group(source, group * GROUP, x + group * RECORD_BYTES)
    run_blocks(arguments)


def _body_q4(work: int) -> None:
    _run_q4(work)


def _body_q8(work: int) -> None:
    _run_q8(work)


Q4 = Kernel("8q", _entry, _body_q4)
Q8 = Kernel("8q", _entry, _body_q8)


def linear(kernel: Kernel, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x Wᵀ + b; x [M, K], packed as the kernel reads it, out [M, N]."""
    records = scratch(x.numel() // GROUP * RECORD_BYTES)
    kernel(records.data_ptr(), packed.data_ptr(), floats(bias), floats(out), *x.shape, out.shape[1], floats(x))
