"""Calls compiled kernels by address, alone or on torch's own OpenMP threads.

A kernel is `body(arguments)`: it reads its arguments, takes work items from a shared counter until none is left, and
returns. One thread or many may run it; items never depend on each other. Sharing torch's thread pool matters: a second
pool on the same cores fights with the first one's spinning threads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import c_function, cgutils, intrinsic, ir, types


@intrinsic
def int_arguments(typing_context: Any, arguments: Any, count: Any) -> Any:
    """The first `count` arguments, addresses or integers, as a tuple."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loads = [_load_argument(builder, args[0], position, ir.IntType(64)) for position in range(count.literal_value)]
        return cgutils.pack_array(builder, loads)

    return types.UniTuple(types.int64, count.literal_value)(arguments, count), emit


@intrinsic
def float_argument(typing_context: Any, arguments: Any, position: Any) -> Any:
    """The floating point argument at `position`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load_argument(builder, args[0], position.literal_value, ir.DoubleType())

    return types.float64(arguments, position), emit


def _load_argument(builder: Any, arguments: Any, position: int, element: Any) -> Any:
    address = builder.add(arguments, ir.Constant(arguments.type, 8 * (position + 1)))  # the counter comes first
    return builder.load(builder.inttoptr(address, element.as_pointer()))


@intrinsic
def next_item(typing_context: Any, arguments: Any) -> Any:
    """Takes the next work item: 0, 1, 2, … each exactly once over all threads."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), emit


@functools.cache
def _openmp() -> Any:
    """The GNU-compatible OpenMP runtime that torch has loaded, or None: kernels then run on the calling thread."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    own = sorted(path for path in paths if "torch" in path) or sorted(paths)
    if not own:
        return None
    library = ctypes.CDLL(own[0])
    library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    library.GOMP_parallel.restype = None
    return library


_KERNELS: list[Kernel] = []


class Kernel:
    """A compiled body and the layout of its arguments ("q" for an address or integer, "d" for a float)."""

    def __init__(self, body: Callable[[int], None], layout: str) -> None:
        self._body = body
        self._struct = struct.Struct("=q" + layout)
        self._buffer = ctypes.c_char * self._struct.size
        _KERNELS.append(self)

    @functools.cached_property
    def address(self) -> int:
        """Of the compiled body, from an earlier process's cache if there is one."""
        return c_function(self._body)

    @functools.cached_property
    def _serial(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, *arguments: float, is_parallel: bool = False) -> None:
        """Runs the body; `is_parallel` on all of torch's threads, which pays above some 20 µs of work."""
        buffer = self._buffer()
        self._struct.pack_into(buffer, 0, 0, *arguments)
        address = ctypes.addressof(buffer)
        if is_parallel and (threads := torch.get_num_threads()) > 1 and (openmp := _openmp()):
            openmp.GOMP_parallel(self.address, address, threads, 0)
        else:
            self._serial(address)


def compile_kernels() -> None:
    """Compiles every imported kernel now rather than at its first call."""
    for kernel in _KERNELS:
        assert kernel.address


def floats(tensor: Tensor | None) -> int:
    """Address of a contiguous float32 tensor, 0 for None."""
    return _address_of(tensor, torch.float32)


def ints(tensor: Tensor) -> int:
    """Address of a contiguous int32 tensor."""
    return _address_of(tensor, torch.int32)


def _address_of(tensor: Tensor | None, dtype: torch.dtype) -> int:
    if tensor is None:
        return 0
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(
            f"a kernel needs a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}"
        )
    return int(tensor.data_ptr())
