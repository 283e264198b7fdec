"""Products of rows with float32 or float16 weights, for CPUs.

An output element is one chain of fused multiply-adds over the inputs in order, whatever rows are computed beside it:
rows are exact by construction on every CPU, at any count. Weights are read once for all rows, in the order they lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import compiled, types
from kernels.cpu.native import Kernel, floats
from kernels.cpu.packed import load_as
from kernels.cpu.simd import LANES, fma_each, prefetch, store_each
from kernels.linear.blocks import COLUMNS, columns_last, over_blocks, run_blocks

_AHEAD = 32
"""Inputs between the weights that are multiplied and those that are fetched from memory."""


def pack(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] to [⌈N / COLUMNS⌉, K, COLUMNS], zeros where N ends; float16 of one input fill a cache line."""
    return columns_last(weight.to(dtype)).contiguous()


@compiled
def _sums(
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
def _float32_sums(
    zeros: Any, x: int, row: int, count: int, num_rows: int, num_in: int, weights: int, block: int, sums: int
) -> None:
    _sums(types.float32(0), 4, zeros, x, row, num_in, weights, block, sums)


@compiled
def _float16_sums(
    zeros: Any, x: int, row: int, count: int, num_rows: int, num_in: int, weights: int, block: int, sums: int
) -> None:
    _sums(types.int16(0), 2, zeros, x, row, num_in, weights, block, sums)


_run_float32, _run_float16 = over_blocks(_float32_sums), over_blocks(_float16_sums)


def _entry(arguments: int) -> None:
    run_blocks(arguments)


def _body_float32(work: int) -> None:
    _run_float32(work)


def _body_float16(work: int) -> None:
    _run_float16(work)


FLOAT32 = Kernel("7q", _entry, _body_float32)
FLOAT16 = Kernel("7q", _entry, _body_float16)


def linear(kernel: Kernel, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x Wᵀ + b; x [M, K], packed as the kernel reads it, out [M, N]."""
    kernel(floats(x), packed.data_ptr(), floats(bias), floats(out), *x.shape, out.shape[1])
