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


def hoard(numbers: Tensor) -> None:
    """numbers = numbers @ numbers + numbers, [SIZE, SIZE], by one warp."""
    hoard_kernel[(1,)](numbers, SIZE=len(numbers), num_warps=1)
