"""SwiGLU's activation for CPUs (see `reference.py`)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from kernels.cpu.jit import compiled
from kernels.cpu.native import Kernel, floats, int_arguments
from kernels.cpu.simd import LANES, exp2, load_part, splat, store_part

_MINUS_LOG2_E = -math.log2(math.e)


@compiled
def _activate(gate: Any, up: Any) -> Any:
    return gate / (splat(1.0) + exp2(gate * splat(_MINUS_LOG2_E))) * up


def _silu_mul_entry(arguments: int) -> None:
    gate_up, out, num_rows, size = int_arguments(arguments, 4)
    for row in range(num_rows):
        gate, up, target = row * 2 * size, row * 2 * size + size, row * size
        for offset in range(0, size, LANES):
            count = size - offset
            part = _activate(load_part(gate_up, gate + offset, count), load_part(gate_up, up + offset, count))
            store_part(out, target + offset, count, part)


SILU_MUL = Kernel("4q", _silu_mul_entry)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `reference.silu_mul`."""
    SILU_MUL(floats(gate_up), floats(out), *out.shape)
