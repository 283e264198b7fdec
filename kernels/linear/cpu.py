"""Products of float32 rows with packed weights for CPUs.

An output element is one chain of fused multiply-adds over the inputs in order, whatever rows are computed beside it:
rows are exact by construction on every CPU, at any count. Weights are read once for all rows, in the order they lie.
A weight of 4 or 8 bits becomes one float32, rounded once (level · scale + minimum), before it is multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import HAS_AVX512, compiled, types
from kernels.cpu.native import Kernel, arguments_of, floats, int_arguments, next_item, run_items
from kernels.cpu.packed import load_as, load_nibbles
from kernels.cpu.simd import (
    LANES,
    fma,
    fma_each,
    load,
    load_part,
    prefetch,
    splat,
    stack_floats,
    store_each,
    store_part,
)

COLUMNS = 2 * LANES
"""Output columns of a block of packed weights [N / COLUMNS, K, COLUMNS]: float16 of one input fill a cache line."""
_PARALLEL_WORK = 1 << 17
"""Rows times weights above which a second thread pays."""
_AHEAD = 32
"""Inputs between the weights that are multiplied and those that are fetched from memory."""
GROUP = 32
"""Inputs that share a scale."""
_Q4_BYTES, _Q8_BYTES = COLUMNS * (2 + 2 + GROUP // 2), COLUMNS * (2 + GROUP)  # of a block's group
_Q4_AHEAD, _Q8_AHEAD = 3 * _Q4_BYTES // 4, 2 * _Q8_BYTES // 4  # as _AHEAD, in 4 bytes
_ROWS = 8 if HAS_AVX512 else 2  # times 2 · 16 sums, kept in registers
_NUM_SUMS = _ROWS * COLUMNS


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] to [⌈N / COLUMNS⌉, K, COLUMNS], zeros where N ends."""
    return _columns_last(weight.to(dtype)).contiguous()


def _columns_last(values: Tensor) -> Tensor:
    """[N, G, ...] to [⌈N / COLUMNS⌉, G, ..., COLUMNS], zeros where N ends."""
    num_out = len(values)
    blocks = values.new_zeros(-(-num_out // COLUMNS) * COLUMNS, *values.shape[1:])
    blocks[:num_out] = values
    return blocks.view(-1, COLUMNS, *values.shape[1:]).movedim(1, -1)


def _as_bytes(values: Tensor) -> Tensor:
    blocks, groups = values.shape[:2]
    return values.contiguous().view(torch.uint8).view(blocks, groups, -1)


def pack_q4(levels: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """uint8 levels [N, K] below 16, float16 scales and minimums [N, K / GROUP] to what `Q4` reads.

    For each block of COLUMNS outputs and each group: the columns' scales, their minimums, and for each input the
    columns' levels, column i and column i + LANES in one byte.
    """
    grouped = _columns_last(levels.view(len(levels), -1, GROUP))
    nibbles = grouped[..., :LANES] | grouped[..., LANES:] << 4
    return torch.cat([_as_bytes(_columns_last(part)) for part in (scales, minimums)] + [_as_bytes(nibbles)], dim=-1)


def pack_q8(levels: Tensor, scales: Tensor) -> Tensor:
    """int8 levels [N, K] and float16 scales [N, K / GROUP] to what `Q8` reads: as `pack_q4`, a byte for a level."""
    grouped = _columns_last(levels.view(len(levels), -1, GROUP))
    return torch.cat([_as_bytes(_columns_last(scales)), _as_bytes(grouped)], dim=-1)


@compiled
def _float_sums(
    like: Any, width: int, zeros: Any, x: int, row: int, num_in: int, weights: int, block: int, sums: int
) -> None:
    left, right = zeros, zeros
    start = block * num_in * COLUMNS
    for element in range(num_in):
        index = row * num_in + element
        ahead = (start + (element + _AHEAD) * COLUMNS) * width // 4
        prefetch(weights, ahead)
        if width == 4:
            prefetch(weights, ahead + LANES)
        left = fma_each(left, x, index, num_in, load_as(like, weights, start + element * COLUMNS))
        right = fma_each(right, x, index, num_in, load_as(like, weights, start + element * COLUMNS + LANES))
    store_each(left, sums, 0, COLUMNS)
    store_each(right, sums, LANES, COLUMNS)


@compiled
def _float32_sums(zeros: Any, x: int, row: int, num_in: int, weights: int, block: int, sums: int) -> None:
    _float_sums(types.float32(0), 4, zeros, x, row, num_in, weights, block, sums)


@compiled
def _float16_sums(zeros: Any, x: int, row: int, num_in: int, weights: int, block: int, sums: int) -> None:
    _float_sums(types.int16(0), 2, zeros, x, row, num_in, weights, block, sums)


@compiled
def _q4_sums(zeros: Any, x: int, row: int, num_in: int, weights: int, block: int, sums: int) -> None:
    left, right = zeros, zeros
    half, num_groups = types.int16(0), num_in // GROUP
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q4_BYTES
        left_scale, right_scale = load_as(half, start, 0), load_as(half, start, LANES)
        left_min, right_min = load_as(half, start, 2 * LANES), load_as(half, start, 3 * LANES)
        for element in range(GROUP):
            index = row * num_in + group * GROUP + element
            prefetch(start, _Q4_AHEAD + element * LANES // 4)
            low, high = load_nibbles(start, 4 * COLUMNS + element * LANES)
            left = fma_each(left, x, index, num_in, fma(low, left_scale, left_min))
            right = fma_each(right, x, index, num_in, fma(high, right_scale, right_min))
    store_each(left, sums, 0, COLUMNS)
    store_each(right, sums, LANES, COLUMNS)


@compiled
def _q8_sums(zeros: Any, x: int, row: int, num_in: int, weights: int, block: int, sums: int) -> None:
    left, right = zeros, zeros
    byte, half, num_groups = types.int8(0), types.int16(0), num_in // GROUP
    for group in range(num_groups):
        start = weights + (block * num_groups + group) * _Q8_BYTES
        left_scale, right_scale = load_as(half, start, 0), load_as(half, start, LANES)
        for element in range(GROUP):
            index = row * num_in + group * GROUP + element
            place = 2 * COLUMNS + element * COLUMNS
            prefetch(start, _Q8_AHEAD + element * COLUMNS // 4)
            left = fma_each(left, x, index, num_in, load_as(byte, start, place) * left_scale)
            right = fma_each(right, x, index, num_in, load_as(byte, start, place + LANES) * right_scale)
    store_each(left, sums, 0, COLUMNS)
    store_each(right, sums, LANES, COLUMNS)


@compiled
def _finish(sums: int, num_rows: int, column: int, num_out: int, bias: int, out: int, row: int) -> None:
    """Sums [num_rows, COLUMNS] and the bias, to their place in `out`."""
    for part in range(2):
        first = column + part * LANES
        count = num_out - first
        if count > 0:
            added = load_part(bias, first, count) if bias != 0 else splat(0.0)
            for query in range(num_rows):
                total = load(sums, query * COLUMNS + part * LANES) + added
                store_part(out, (row + query) * num_out + first, count, total)


def _over_rows(sums_of: Any) -> Any:
    """The loop over blocks and rows around a function that computes the sums of one block's columns."""

    @compiled
    def many(zero: Any, count: int, x: int, row: int, num_in: int, weights: int, block: int, sums: int) -> None:
        """3 to 8 rows: apart, since only CPUs with AVX-512 have the registers, so that others do not compile it."""
        three = (zero, zero, zero)
        if count == 3:
            sums_of(three, x, row, num_in, weights, block, sums)
        elif count == 4:
            sums_of((*three, zero), x, row, num_in, weights, block, sums)
        elif count == 5:
            sums_of((*three, zero, zero), x, row, num_in, weights, block, sums)
        elif count == 6:
            sums_of((*three, *three), x, row, num_in, weights, block, sums)
        elif count == 7:
            sums_of((*three, *three, zero), x, row, num_in, weights, block, sums)
        else:
            sums_of((*three, *three, zero, zero), x, row, num_in, weights, block, sums)

    @compiled
    def run(work: int) -> None:
        x, weights, bias, out, num_rows, num_in, num_out = int_arguments(arguments_of(work), 7)
        zero, sums = splat(0.0), stack_floats(_NUM_SUMS)
        block = next_item(work)
        while block * COLUMNS < num_out:
            row = 0
            while row < num_rows:
                # As many rows as are left, at most _ROWS; later passes find the block's weights in a cache.
                count = min(num_rows - row, _ROWS)
                if count == 1:
                    sums_of((zero,), x, row, num_in, weights, block, sums)
                elif count == 2:
                    sums_of((zero, zero), x, row, num_in, weights, block, sums)
                elif _ROWS > 2:
                    many(zero, count, x, row, num_in, weights, block, sums)
                _finish(sums, count, block * COLUMNS, num_out, bias, out, row)
                row += count
            block = next_item(work)

    return run


def _entry(arguments: int) -> None:
    _, _, _, _, num_rows, num_in, num_out = int_arguments(arguments, 7)
    run_items(arguments, num_rows * num_in * num_out > _PARALLEL_WORK)


_run_float32, _run_float16 = _over_rows(_float32_sums), _over_rows(_float16_sums)
_run_q4, _run_q8 = _over_rows(_q4_sums), _over_rows(_q8_sums)


def _body_float32(work: int) -> None:
    _run_float32(work)


def _body_float16(work: int) -> None:
    _run_float16(work)


def _body_q4(work: int) -> None:
    _run_q4(work)


def _body_q8(work: int) -> None:
    _run_q8(work)


FLOAT32 = Kernel("7q", _entry, _body_float32)
FLOAT16 = Kernel("7q", _entry, _body_float16)
Q4 = Kernel("7q", _entry, _body_q4)
Q8 = Kernel("7q", _entry, _body_q8)


def linear(kernel: Kernel, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x Wᵀ + b; x [M, K], packed as the kernel reads it, out [M, N]."""
    kernel(floats(x), packed.data_ptr(), floats(bias), floats(out), *x.shape, out.shape[1])
