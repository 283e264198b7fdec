"""Calls compiled kernels by address.

A kernel has an entry, which the calling thread runs, and may have a body: the entry calls `run_items`, and in the body
the calling thread and the helpers of `kernels.cpu.pool` take work items from a shared counter until none is left. Items
never depend on each other, so a result does not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.jit import c_function, cgutils, compiled, intrinsic, ir, types
from kernels.cpu.pool import pool_of, run_region

_INT64 = ir.IntType(64)
_HEADER = 2  # body and pool, before a kernel's own arguments
_num_helpers = 0


def num_threads() -> int:
    """Threads that a kernel runs on."""
    return _num_helpers + 1


def set_num_threads(count: int) -> None:
    """Sets the threads of the compiled kernels, in the whole process; 1 until it is called."""
    global _num_helpers
    _num_helpers = count - 1


@dataclass(frozen=True)
class Recording:
    """Kernel calls that `kernels.cpu.program` will run."""

    calls: list[tuple[int, bytes]] = field(default_factory=list)  # entry and packed arguments of each
    scratch: list[Tensor] = field(default_factory=list)  # memory that those calls use


class _Thread(threading.local):
    recording: Recording | None = None


_thread = _Thread()


def record_into(recording: Recording | None) -> None:
    """Kernels that this thread calls from now on are recorded, not run; None: run."""
    _thread.recording = recording


def scratch(num_bytes: int) -> Tensor:
    """Memory for one kernel call, uint8, at least so many bytes; recorded calls share it, as they run in turn."""
    recording = _thread.recording
    for held in recording.scratch if recording else ():
        if len(held) >= num_bytes:
            return held
    made = torch.empty(num_bytes, dtype=torch.uint8)
    if recording:
        recording.scratch.append(made)
    return made


def helpers_address() -> int:
    """The pool of helper threads, or 0 if there are none."""
    return pool_of(_num_helpers).address if _num_helpers else 0


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
def _header(typing_context: Any, arguments: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return cgutils.pack_array(builder, [_load(builder, args[0], position) for position in range(_HEADER)])

    return types.UniTuple(types.int64, _HEADER)(types.int64), emit


@compiled
def run_items_of(plan: int, arguments: int, is_parallel: bool) -> None:
    """As `run_items`, but `arguments_of` gives the body `plan`, an address of the entry's choice."""
    body, pool = _header(arguments)
    run_region(pool if is_parallel else 0, body, plan)


@compiled
def run_items(arguments: int, is_parallel: bool) -> None:
    """In an entry: runs the kernel's body, with helpers if that `is_parallel`; returns when every item is done."""
    run_items_of(arguments, arguments, is_parallel)


@compiled
def keep(array: Any) -> None:
    """Called after the last use of an array's address: an array is freed after its own last use, addresses are none."""


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


class Kernel:
    """A compiled entry, its body if it has one, and the layout of the arguments.

    In `layout`, "q" is an address or integer and "d" a float; integers come first.
    """

    def __init__(self, layout: str, entry: Callable[[int], None], body: Callable[[int], None] | None = None) -> None:
        self._entry, self._body = entry, body
        self._pack = struct.Struct(f"={_HEADER}q" + layout).pack

    def compile(self) -> None:
        """Compiles now rather than at the first call, or loads what an earlier process compiled."""
        _ = self._call, self._body_address

    @functools.cached_property
    def _call(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._entry_address)

    @functools.cached_property
    def _entry_address(self) -> int:
        return c_function(self._entry)

    @functools.cached_property
    def _body_address(self) -> int:
        return 0 if self._body is None else c_function(self._body)

    def __call__(self, *arguments: float) -> None:
        """Runs the kernel on `num_threads()` threads, or records it. The GIL is released while it runs."""
        pool = 0 if self._body is None else helpers_address()
        packed = self._pack(self._body_address, pool, *arguments)
        if _thread.recording is None:
            self._call(packed)
        else:
            _thread.recording.calls.append((self._entry_address, packed))


def floats(tensor: Tensor | None) -> int:
    """Address of a contiguous float32 tensor, 0 for None."""
    if tensor is None:
        return 0
    return _address(tensor, torch.float32)


def halves(tensor: Tensor) -> int:
    """Address of a contiguous float16 tensor."""
    return _address(tensor, torch.float16)


def ints(tensor: Tensor) -> int:
    """Address of a contiguous int32 tensor."""
    return _address(tensor, torch.int32)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(
            f"a kernel needs a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()
