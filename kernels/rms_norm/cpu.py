"""RMSNorm for CPUs, row by row in a fixed order (see `reference.py`)."""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.jit import compiled
from kernels.cpu.native import Kernel, arguments_of, float_argument, floats, int_arguments, next_item, run_items
from kernels.cpu.norm import PARALLEL_ELEMENTS, ROWS_OF_ITEM, inverse_rms
from kernels.cpu.simd import LANES, load_part, splat, store_part


@compiled
def _normalise(source: int, start: int, size: int, weight: int, eps: float, out: int) -> None:
    scale = splat(inverse_rms(source, start, size, eps))
    for offset in range(0, size, LANES):
        count = size - offset
        part = load_part(source, start + offset, count) * scale * load_part(weight, offset, count)
        store_part(out, start + offset, count, part)


def _entry(arguments: int) -> None:
    num_rows, size = int_arguments(arguments, 2)
    run_items(arguments, num_rows * size > PARALLEL_ELEMENTS)


def _body(work: int) -> None:
    arguments = arguments_of(work)
    num_rows, size, x, delta, weight, out = int_arguments(arguments, 6)
    eps = float_argument(arguments, 6)
    begin = next_item(work) * ROWS_OF_ITEM
    while begin < num_rows:
        for row in range(begin, min(begin + ROWS_OF_ITEM, num_rows)):
            start = row * size
            if delta != 0:
                for index in range(start, start + size, LANES):
                    count = start + size - index
                    store_part(x, index, count, load_part(x, index, count) + load_part(delta, index, count))
            _normalise(x, start, size, weight, eps, out)
        begin = next_item(work) * ROWS_OF_ITEM


RMS_NORM = Kernel("6qd", _entry, _body)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `reference.rms_norm`."""
    RMS_NORM(*x.shape, floats(x), 0, floats(weight), floats(out), eps)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `reference.add_rms_norm`."""
    RMS_NORM(*residual.shape, floats(residual), floats(delta), floats(weight), floats(out), eps)
