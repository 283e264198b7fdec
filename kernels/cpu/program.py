"""Kernel calls recorded once and run again by one call, as a CUDA graph does: a step of many small kernels then costs
no Python between them.

A recording holds addresses and sizes. Whoever runs it again keeps the tensors alive and their sizes as they were, and
lets nothing but kernels compute while it is recorded; kernels that are recorded do not run.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from kernels.cpu.jit import c_function, intrinsic, ir, types
from kernels.cpu.native import Recording, record_into
from kernels.cpu.pool import load_word

_INT64 = ir.IntType(64)


@intrinsic
def _enter(typing_context: Any, entry: Any, arguments: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), (args[1],))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _run_calls(calls: int) -> None:
    """Calls the entries in turn: their number, then an entry and its arguments' address for each."""
    for call in range(load_word(calls)):
        _enter(load_word(calls + 16 * call + 8), load_word(calls + 16 * call + 16))


@functools.cache
def _runner() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(c_function(_run_calls))


class Program:
    """A finished recording."""

    def __init__(self, recording: Recording) -> None:
        self._scratch = recording.scratch
        self._arguments = np.frombuffer(b"".join(arguments for _, arguments in recording.calls), np.int64).copy()
        calls, address = [len(recording.calls)], self._arguments.ctypes.data
        for entry, arguments in recording.calls:
            calls += [entry, address]
            address += len(arguments)
        self._calls = np.array(calls)
        self._run, self._address = _runner(), self._calls.ctypes.data

    def run(self) -> None:
        """Runs the kernels in the order they were recorded. The GIL is released meanwhile."""
        self._run(self._address)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """While it is entered, kernels that this thread calls are recorded and not run."""
    made = Recording()
    record_into(made)
    try:
        yield made
    finally:
        record_into(None)
