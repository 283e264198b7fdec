"""SwiGLU's activation for CPUs (see `reference.py`)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from kernels.cpu.jit import compiled
from kernels.cpu.native import Kernel, arguments_of, floats, int_arguments, next_item, run_items
from kernels.cpu.norm import PARALLEL_ELEMENTS, ROWS_OF_ITEM
from kernels.cpu.simd import LANES, exp2, load_part, splat, store_part

_MINUS_LOG2_E = -math.log2(math.e)


@compiled
def _activate(gate: Any, up: Any) -> Any:
    return gate / (splat(1.0) + exp2(gate * splat(_MINUS_LOG2_E))) * up


def _entry(arguments: int) -> None:
    num_rows, size = int_arguments(arguments, 2)
    run_items(arguments, num_rows * size > PARALLEL_ELEMENTS)


def _body(work: int) -> None:
    num_rows, size, gate_up, out = int_arguments(arguments_of(work), 4)
    begin = next_item(work) * ROWS_OF_ITEM
    while begin < num_rows:
        for row in range(begin, min(begin + ROWS_OF_ITEM, num_rows)):
            gate, up, target = row * 2 * size, row * 2 * size + size, row * size
            for offset in range(0, size, LANES):
                count = size - offset
                part = _activate(load_part(gate_up, gate + offset, count), load_part(gate_up, up + offset, count))
                store_part(out, target + offset, count, part)
        begin = next_item(work) * ROWS_OF_ITEM


SILU_MUL = Kernel("4q", _entry, _body)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `reference.silu_mul`."""
    SILU_MUL(*out.shape, floats(gate_up), floats(out))
