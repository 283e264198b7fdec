"""What the machine gives at best: bytes read from memory, and multiply-adds in registers, on all threads."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from kernels.cpu.integers import accumulate_each, dot_each, load_levels, zero_each
from kernels.cpu.jit import HAS_AVX512, compiled
from kernels.cpu.native import Kernel, arguments_of, floats, int_arguments, next_item, run_items
from kernels.cpu.simd import fma_each, load, splat, store, store_each

_ITEMS = 64
_BLOCK_FLOATS = 1 << 20  # of an item of the read: 4 MB
_LINE = 16
_SUMS = 8 if HAS_AVX512 else 2
_ROUNDS = 50_000
_BEST_OF = 5


class Peaks(NamedTuple):
    """Measured with `kernels.cpu.native.num_threads()` threads."""

    bytes_per_second: float
    """Read from memory, in order."""
    float_macs_per_second: float
    """float32 fused multiply-adds, a factor broadcast from L1, as the kernels use them."""
    int8_macs_per_second: float
    """Products of an unsigned and a signed byte, summed in 32 bits."""


def _entry(arguments: int) -> None:
    run_items(arguments, True)


def _read(work: int) -> None:
    source, out = int_arguments(arguments_of(work), 2)
    item = next_item(work)
    while item < _ITEMS:
        first, second = splat(0.0), splat(0.0)
        start = item * _BLOCK_FLOATS
        for index in range(start, start + _BLOCK_FLOATS, 2 * _LINE):
            first = first + load(source, index)
            second = second + load(source, index + _LINE)
        store(out, item * _LINE, first + second)
        item = next_item(work)


@compiled
def _multiply_floats(zeros: Any, source: int, out: int, item: int) -> None:
    left, right = zeros, zeros
    factor = load(source, 0)
    for round_ in range(_ROUNDS):
        index = round_ % 2 * _LINE
        left = fma_each(left, source, index, 1, factor)
        right = fma_each(right, source, index, 1, factor)
    store_each(left, out, item * 2 * _SUMS * _LINE, _LINE)
    store_each(right, out, (item * 2 + 1) * _SUMS * _LINE, _LINE)


@compiled
def _multiply_bytes(zeros: Any, source: int, out: int, item: int) -> None:
    left, right = zero_each(zeros), zero_each(zeros)
    levels = load_levels(source, 0)
    for round_ in range(_ROUNDS):
        offset = round_ % 2 * 4 * _LINE
        left = dot_each(left, levels, 255, source, offset, 4)
        right = dot_each(right, levels, 255, source, offset, 4)
    store_each(zeros, out, item * 2 * _SUMS * _LINE, _LINE)
    one = splat(1.0)
    accumulate_each(left, out, item * 2 * _SUMS * _LINE, _LINE, one, None, source, 0, 4)
    accumulate_each(right, out, item * 2 * _SUMS * _LINE, _LINE, one, None, source, 0, 4)


def _over_items(multiply: Any) -> Any:
    @compiled
    def run(work: int) -> None:
        source, out = int_arguments(arguments_of(work), 2)
        zero = splat(0.0)
        four = (zero, zero, zero, zero)
        item = next_item(work)
        while item < _ITEMS:
            if _SUMS == 8:
                multiply((*four, *four), source, out, item)
            else:
                multiply((zero, zero), source, out, item)
            item = next_item(work)

    return run


_run_floats, _run_bytes = _over_items(_multiply_floats), _over_items(_multiply_bytes)


def _float_macs(work: int) -> None:
    _run_floats(work)


def _byte_macs(work: int) -> None:
    _run_bytes(work)


def measure_peaks() -> Peaks:
    """Takes about a second."""
    source, out = torch.ones(_ITEMS * _BLOCK_FLOATS), torch.zeros(_ITEMS * 2 * 8 * _LINE)

    def best(body: Any) -> float:
        kernel = Kernel("2q", _entry, body)
        kernel(floats(source), floats(out))
        times = []
        for _ in range(_BEST_OF):
            started = time.perf_counter()
            kernel(floats(source), floats(out))
            times.append(time.perf_counter() - started)
        return min(times)

    macs = _ITEMS * _ROUNDS * 2 * _SUMS * _LINE
    return Peaks(source.numel() * 4 / best(_read), macs / best(_float_macs), 4 * macs / best(_byte_macs))
