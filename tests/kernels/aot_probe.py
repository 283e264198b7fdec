"""A kernel with more numbers than registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def hoard_kernel(numbers_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    places = numbers_ptr + row * SIZE + column
    numbers = tl.load(places)
    tl.store(places, tl.dot(numbers, numbers) + numbers)


@triton.jit
def narrow_kernel(rows_ptr, page_table_ptr, out_ptr, row_stride, page_stride, wide_stride):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    page = tl.load(page_table_ptr + row)
    number = tl.load(rows_ptr + row * row_stride) + tl.load(rows_ptr + page.to(tl.int64) * page_stride)
    tl.store(out_ptr + row.to(tl.int64) * wide_stride + page * 1024, number)


def narrow(rows: Tensor, page_table: Tensor, out: Tensor) -> None:
    """Places of which two products have 32 bits: a row's, and a page's that is no stride's."""
    narrow_kernel[(len(rows),)](rows, page_table, out, 12345, 23456, 34567)


def hoard(numbers: Tensor) -> None:
    """numbers = numbers @ numbers + numbers, [SIZE, SIZE], by one warp."""
    hoard_kernel[(1,)](numbers, SIZE=len(numbers), num_warps=1)
