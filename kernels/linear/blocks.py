"""What all packed linear layers share: blocks of output columns, and the loop over blocks and rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import HAS_AVX512, compiled
from kernels.cpu.native import arguments_of, int_arguments, next_item, run_items
from kernels.cpu.simd import LANES, load, load_part, splat, stack_floats, store_part

COLUMNS = 2 * LANES
"""Output columns of a block of packed weights; a block's weights lie in the order in which they are read."""
_PARALLEL_WORK = 1 << 17
"""Rows times weights above which a second thread pays."""
_ROWS = 8 if HAS_AVX512 else 2  # times 2 · 16 sums, kept in registers
_NUM_SUMS = _ROWS * COLUMNS


def columns_last(values: Tensor) -> Tensor:
    """[N, G, ...] to [⌈N / COLUMNS⌉, G, ..., COLUMNS], zeros where N ends."""
    num_out = len(values)
    blocks = values.new_zeros(-(-num_out // COLUMNS) * COLUMNS, *values.shape[1:])
    blocks[:num_out] = values
    return blocks.view(-1, COLUMNS, *values.shape[1:]).movedim(1, -1)


def as_bytes(values: Tensor) -> Tensor:
    """[blocks, groups, ...] to the bytes of each group, [blocks, groups, bytes]."""
    blocks, groups = values.shape[:2]
    return values.contiguous().view(torch.uint8).view(blocks, groups, -1)


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


def over_blocks(sums_of: Any) -> Any:
    """The loop over blocks and rows around `sums_of`, which computes a block's columns for one row or a few.

    It is called as sums_of(zeros, x, row, num_in, weights, block, sums): one zero vector a row, and the address of
    float32 sums [rows, COLUMNS].
    """

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


@compiled
def run_blocks(arguments: int) -> None:
    """In an entry whose first arguments are x, weights, bias, out and the three sizes: runs the body."""
    _, _, _, _, num_rows, num_in, num_out = int_arguments(arguments, 7)
    run_items(arguments, num_rows * num_in * num_out > _PARALLEL_WORK)
