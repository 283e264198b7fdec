"""What all packed linear layers share: blocks of output columns, and the loop over blocks and rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import HAS_AVX512, compiled
from kernels.cpu.native import arguments_of, int_arguments, next_item, run_items
from kernels.cpu.simd import LANES, load, load_part, splat, stack_floats, store_part, zeros

COLUMNS = 2 * LANES
"""Output columns of a block of packed weights; a block's weights lie in the order in which they are read."""
_PARALLEL_WORK = 1 << 17
"""Rows times weights above which a second thread pays."""
TILE_ROWS = 8 if HAS_AVX512 else 2
"""Rows whose 2 · 16 sums fit into registers."""
_MAX_ROWS = 128  # whose sums fit into the first cache beside what else is read
_NUM_SUMS = _MAX_ROWS * COLUMNS


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


def over_blocks(sums_of: Any, tiles_of: Any = None) -> Any:
    """The loop over blocks and rows around `sums_of`, which computes a block's columns for a few rows.

    It is called as sums_of(zeros, x, row, count, num_rows, num_in, weights, block, sums): for `count` rows from `row`
    of `num_rows`, one zero vector for each, and the address of float32 sums [count, COLUMNS]. Of TILE_ROWS rows and
    more, whole tiles go to `tiles_of`, many at once, with zero vectors for one; without it, one by one to `sums_of`.
    """
    whole, max_rows = tiles_of or sums_of, _MAX_ROWS if tiles_of else TILE_ROWS

    @compiled
    def some(x: int, row: int, count: int, num_rows: int, num_in: int, weights: int, block: int, sums: int) -> None:
        """2 to 7 rows: apart, since only CPUs with AVX-512 have the registers, so that others do not compile it."""
        if count == 2:
            sums_of(zeros(2), x, row, count, num_rows, num_in, weights, block, sums)
        elif count == 3:
            sums_of(zeros(3), x, row, count, num_rows, num_in, weights, block, sums)
        elif count == 4:
            sums_of(zeros(4), x, row, count, num_rows, num_in, weights, block, sums)
        elif count == 5:
            sums_of(zeros(5), x, row, count, num_rows, num_in, weights, block, sums)
        elif count == 6:
            sums_of(zeros(6), x, row, count, num_rows, num_in, weights, block, sums)
        else:
            sums_of(zeros(7), x, row, count, num_rows, num_in, weights, block, sums)

    @compiled
    def run(work: int) -> None:
        x, weights, bias, out, num_rows, num_in, num_out = int_arguments(arguments_of(work), 7)
        sums = stack_floats(_NUM_SUMS)
        block = next_item(work)
        while block * COLUMNS < num_out:
            row = 0
            while row < num_rows:
                # Later passes find the block's weights in a cache.
                count = min(num_rows - row, max_rows)
                if count >= TILE_ROWS:
                    count -= count % TILE_ROWS
                    whole(zeros(TILE_ROWS), x, row, count, num_rows, num_in, weights, block, sums)
                elif count == 1:
                    sums_of(zeros(1), x, row, count, num_rows, num_in, weights, block, sums)
                elif TILE_ROWS > 2:
                    some(x, row, count, num_rows, num_in, weights, block, sums)
                _finish(sums, count, block * COLUMNS, num_out, bias, out, row)
                row += count
            block = next_item(work)

    return run


@compiled
def run_blocks(arguments: int) -> None:
    """In an entry whose first arguments are x, weights, bias, out and the three sizes: runs the body."""
    _, _, _, _, num_rows, num_in, num_out = int_arguments(arguments, 7)
    run_items(arguments, num_rows * num_in * num_out > _PARALLEL_WORK)
