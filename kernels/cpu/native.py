"""Calls compiled kernels by address, on the calling thread or on torch's own OpenMP threads.

A kernel has an entry, which one thread runs, and may have a body: the entry calls `run_items`, and every thread in the
body takes work items from a shared counter until none is left. Items never depend on each other, so a result does not
depend on the number of threads. Sharing torch's thread pool matters: a second pool on the same cores fights with the
first one's spinning threads.
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

_INT64 = ir.IntType(64)
_HEADER = 3  # body, GOMP_parallel, threads: the arguments of `run_items`


def _load(builder: Any, base: Any, position: int, element: Any = _INT64) -> Any:
    address = builder.add(base, ir.Constant(_INT64, 8 * position))
    return builder.load(builder.inttoptr(address, element.as_pointer()))


@intrinsic
def int_arguments(typing_context: Any, arguments: Any, count: Any) -> Any:
    """The first `count` arguments, addresses or integers, as a tuple."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loads = [_load(builder, args[0], _HEADER + position) for position in range(count.literal_value)]
        return cgutils.pack_array(builder, loads)

    return types.UniTuple(types.int64, count.literal_value)(arguments, count), emit


@intrinsic
def float_argument(typing_context: Any, arguments: Any, position: Any) -> Any:
    """The floating point argument at `position`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], _HEADER + position.literal_value, ir.DoubleType())

    return types.float64(arguments, position), emit


@intrinsic
def run_items(typing_context: Any, arguments: Any, is_parallel: Any) -> Any:
    """Runs the kernel's body, on all of torch's threads if that `is_parallel`; returns when every item is done."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arguments, is_parallel = args
        work = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))  # the counter of items, the arguments
        builder.store(ir.Constant(ir.ArrayType(_INT64, 2), [0, 0]), work)
        builder.store(arguments, cgutils.gep_inbounds(builder, work, 0, 1))
        body, gomp_parallel, threads = (_load(builder, arguments, position) for position in range(_HEADER))
        work_address = builder.ptrtoint(work, _INT64)
        several = builder.icmp_signed(">", threads, ir.Constant(_INT64, 1))
        with builder.if_else(builder.and_(is_parallel, several)) as (fork, alone):
            with fork:
                unsigned = ir.IntType(32)
                kind = ir.FunctionType(ir.VoidType(), [_INT64, _INT64, unsigned, unsigned])
                count = builder.trunc(threads, unsigned)
                function = builder.inttoptr(gomp_parallel, kind.as_pointer())
                builder.call(function, (body, work_address, count, ir.Constant(unsigned, 0)))
            with alone:
                function = builder.inttoptr(body, ir.FunctionType(ir.VoidType(), [_INT64]).as_pointer())
                builder.call(function, (work_address,))
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean), emit


@intrinsic
def next_item(typing_context: Any, work: Any) -> Any:
    """In a body: takes the next work item; 0, 1, 2, … each exactly once over all threads."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_INT64, 1), "monotonic")

    return types.int64(types.int64), emit


@intrinsic
def arguments_of(typing_context: Any, work: Any) -> Any:
    """In a body: the kernel's arguments."""
    return types.int64(types.int64), lambda context, builder, signature, args: _load(builder, args[0], 1)


@functools.cache
def _gomp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP runtime that torch has loaded; 0 if there is none of that kind."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return 0
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    own = sorted(path for path in paths if "torch" in path) or sorted(paths)
    return ctypes.cast(ctypes.CDLL(own[0]).GOMP_parallel, ctypes.c_void_p).value or 0 if own else 0


class Kernel:
    """A compiled entry, its body if it has one, and the layout of the arguments.

    In `layout`, "q" is an address or integer and "d" a float; integers come first.
    """

    def __init__(self, layout: str, entry: Callable[[int], None], body: Callable[[int], None] | None = None) -> None:
        self._entry, self._body = entry, body
        self._pack = struct.Struct("=3q" + layout).pack

    def compile(self) -> None:
        """Compiles now rather than at the first call, or loads what an earlier process compiled."""
        _ = self._call, self._body_address

    @functools.cached_property
    def _call(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(c_function(self._entry))

    @functools.cached_property
    def _body_address(self) -> int:
        return 0 if self._body is None else c_function(self._body)

    def __call__(self, *arguments: float) -> None:
        """Runs the kernel. The GIL is released meanwhile."""
        threads = torch.get_num_threads() if self._body is not None and _gomp_parallel() else 1
        self._call(self._pack(self._body_address, _gomp_parallel(), threads, *arguments))


def floats(tensor: Tensor | None) -> int:
    """Address of a contiguous float32 tensor, 0 for None."""
    if tensor is None:
        return 0
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise _wrong_layout(tensor, torch.float32)
    return tensor.data_ptr()


def ints(tensor: Tensor) -> int:
    """Address of a contiguous int32 tensor."""
    if tensor.dtype is not torch.int32 or not tensor.is_contiguous():
        raise _wrong_layout(tensor, torch.int32)
    return tensor.data_ptr()


def _wrong_layout(tensor: Tensor, dtype: torch.dtype) -> ValueError:
    return ValueError(f"a kernel needs a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}")
