"""Products of float32 rows with packed weights for CPUs.

An output element is one chain of fused multiply-adds over the inputs in order, whatever rows are computed beside it:
rows are exact by construction on every CPU, at any count. Weights are read once for all rows, in the order they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import HAS_AVX512, compiled, types
from kernels.cpu.native import Kernel, arguments_of, floats, int_arguments, next_item, run_items
from kernels.cpu.simd import LANES, fma_each, load_as, load_part, prefetch, splat, store_part

COLUMNS = 2 * LANES
"""Output columns of a block of packed weights [N / COLUMNS, K, COLUMNS]: float16 of one input fill a cache line."""
_PARALLEL_WORK = 1 << 17
"""Rows times weights above which a second thread pays."""
_AHEAD = 32
"""Inputs between the weights that are multiplied and those that are fetched from memory."""
_ROWS = 8 if HAS_AVX512 else 4  # times 2 · 16 sums, kept in registers


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] to [⌈N / COLUMNS⌉, K, COLUMNS], zeros where N ends."""
    num_out, num_in = weight.shape
    blocks = weight.new_zeros(-(-num_out // COLUMNS) * COLUMNS, num_in, dtype=dtype)
    blocks[:num_out] = weight
    return blocks.view(-1, COLUMNS, num_in).transpose(1, 2).contiguous()


@compiled
def _multiply(
    zeros: Any,
    like: Any,
    width: int,
    x: int,
    row: int,
    num_in: int,
    weights: int,
    block: int,
    num_out: int,
    bias: int,
    out: int,
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
    column = block * COLUMNS
    for part in range(2):
        count = num_out - column - part * LANES
        if count > 0:
            sums = left if part == 0 else right
            added = load_part(bias, column + part * LANES, count) if bias != 0 else splat(0.0)
            for query in range(len(zeros)):
                store_part(out, (row + query) * num_out + column + part * LANES, count, sums[query] + added)


@compiled
def _multiply_many(
    zero: Any,
    count: int,
    like: Any,
    width: int,
    x: int,
    row: int,
    num_in: int,
    weights: int,
    block: int,
    num_out: int,
    bias: int,
    out: int,
) -> None:
    """5 to 8 rows: apart, since only CPUs with AVX-512 have the registers, so that others do not compile it."""
    five = (zero, zero, zero, zero, zero)
    if count == 5:
        _multiply(five, like, width, x, row, num_in, weights, block, num_out, bias, out)
    elif count == 6:
        _multiply((*five, zero), like, width, x, row, num_in, weights, block, num_out, bias, out)
    elif count == 7:
        _multiply((*five, zero, zero), like, width, x, row, num_in, weights, block, num_out, bias, out)
    else:
        _multiply((*five, zero, zero, zero), like, width, x, row, num_in, weights, block, num_out, bias, out)


def _entry(arguments: int) -> None:
    _, _, _, _, num_rows, num_in, num_out = int_arguments(arguments, 7)
    run_items(arguments, num_rows * num_in * num_out > _PARALLEL_WORK)


@compiled
def _run(like: Any, width: int, work: int) -> None:
    x, weights, bias, out, num_rows, num_in, num_out = int_arguments(arguments_of(work), 7)
    zero = splat(0.0)
    block = next_item(work)
    while block * COLUMNS < num_out:
        row = 0
        while row < num_rows:
            # As many rows as are left, at most _ROWS: each pass reads the block's weights once.
            left = min(num_rows - row, _ROWS)
            if left == 1:
                _multiply((zero,), like, width, x, row, num_in, weights, block, num_out, bias, out)
            elif left == 2:
                _multiply((zero, zero), like, width, x, row, num_in, weights, block, num_out, bias, out)
            elif left == 3:
                _multiply((zero, zero, zero), like, width, x, row, num_in, weights, block, num_out, bias, out)
            elif left == 4:
                _multiply((zero, zero, zero, zero), like, width, x, row, num_in, weights, block, num_out, bias, out)
            elif _ROWS > 4:
                _multiply_many(zero, left, like, width, x, row, num_in, weights, block, num_out, bias, out)
            row += left
        block = next_item(work)


def _body_float32(work: int) -> None:
    _run(types.float32(0), 4, work)


def _body_float16(work: int) -> None:
    _run(types.int16(0), 2, work)


FLOAT32 = Kernel("7q", _entry, _body_float32)
FLOAT16 = Kernel("7q", _entry, _body_float16)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x Wᵀ + b; x [M, K], packed float32 or float16, out [M, N]."""
    kernel = FLOAT16 if packed.dtype is torch.float16 else FLOAT32
    kernel(floats(x), packed.data_ptr(), floats(bias), floats(out), *x.shape, out.shape[1])
