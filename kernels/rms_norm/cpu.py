"""RMSNorm for CPUs, row by row in a fixed order (see `reference.py`)."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.jit import compiled
from kernels.cpu.native import Kernel, float_argument, floats, int_arguments
from kernels.cpu.norm import inverse_rms
from kernels.cpu.simd import LANES, load_part, splat, store_part


@compiled
def _normalise(source: int, start: int, size: int, weight: int, eps: float, out: int) -> None:
    scale = splat(inverse_rms(source, start, size, eps))
    for offset in range(0, size, LANES):
        count = size - offset
        part = load_part(source, start + offset, count) * scale * load_part(weight, offset, count)
        store_part(out, start + offset, count, part)


def _rms_norm_entry(arguments: int) -> None:
    x, weight, out, num_rows, size = int_arguments(arguments, 5)
    eps = float_argument(arguments, 5)
    for row in range(num_rows):
        _normalise(x, row * size, size, weight, eps, out)


def _add_rms_norm_entry(arguments: int) -> None:
    residual, delta, weight, out, num_rows, size = int_arguments(arguments, 6)
    eps = float_argument(arguments, 6)
    for index in range(0, num_rows * size, LANES):
        count = num_rows * size - index
        store_part(residual, index, count, load_part(residual, index, count) + load_part(delta, index, count))
    for row in range(num_rows):
        _normalise(residual, row * size, size, weight, eps, out)


RMS_NORM = Kernel("5qd", _rms_norm_entry)
ADD_RMS_NORM = Kernel("6qd", _add_rms_norm_entry)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `reference.rms_norm`."""
    RMS_NORM(floats(x), floats(weight), floats(out), *x.shape, eps)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `reference.add_rms_norm`."""
    ADD_RMS_NORM(floats(residual), floats(delta), floats(weight), floats(out), *residual.shape, eps)
