"""Threads that help with a kernel's work items while there are any.

The calling thread opens a region, works in it like everyone else, closes it when no item is left and waits only for
helpers that are inside. A helper that sleeps, or that the system has not scheduled, is never waited for: on a busy
machine a region costs what its caller alone would take, where joining fixed threads waits for the last to be
scheduled. Helpers spin for a while after a region (a setting), then sleep until the next kernel wakes them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import platform
import threading
import time
from typing import Any

from kernels.cpu.jit import c_function, cgutils, compiled, intrinsic, ir, types

_INT64 = ir.IntType(64)
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_OPEN = 1 << 32
"""Added to the gate while a region is open; the rest of the gate counts the helpers inside."""
_TRIAL_LOOKS = 4000
"""Looks at the gate from which their number in a microsecond is learnt."""

# Byte offsets of a pool's words; those that many threads change have a cache line each.
_GATE, _IS_TAKEN, _REGION, _BODY, _WORK, _MAX_LOOKS, _NUM_BYTES = 0, 64, 128, 136, 144, 192, 256


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INT64.as_pointer())


@intrinsic
def load_word(typing_context: Any, address: Any) -> Any:
    """A 64-bit word, read atomically."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def add_to_word(typing_context: Any, address: Any, amount: Any) -> Any:
    """Adds atomically; returns the word before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def swap_word(typing_context: Any, address: Any, value: Any) -> Any:
    """Replaces atomically; returns the word before."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def _new_work(typing_context: Any, arguments: Any) -> Any:
    """Address, valid in this call, of a work item counter followed by `arguments`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        work = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))
        builder.store(ir.Constant(ir.ArrayType(_INT64, 2), [0, 0]), work)
        builder.store(args[0], cgutils.gep_inbounds(builder, work, 0, 1))
        return builder.ptrtoint(work, _INT64)

    return types.int64(types.int64), emit


@intrinsic
def _call(typing_context: Any, body: Any, work: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), (args[1],))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), ())
        return context.get_dummy_value()

    return types.void(), emit


@compiled
def run_region(pool: int, body: int, arguments: int) -> None:
    """Runs `body` until its items are done, with helpers if there is a pool (not 0) that nobody else uses just now."""
    work = _new_work(arguments)
    if pool != 0 and swap_word(pool + _IS_TAKEN, 1) == 0:
        swap_word(pool + _BODY, body)
        swap_word(pool + _WORK, work)
        add_to_word(pool + _REGION, 1)
        add_to_word(pool + _GATE, _OPEN)
        _call(body, work)
        add_to_word(pool + _GATE, -_OPEN)
        while load_word(pool + _GATE) != 0:
            _pause()
        swap_word(pool + _IS_TAKEN, 0)
    else:
        _call(body, work)


def _help_out(pool: int) -> None:
    """Works in every region of `pool`, once in each, until it has looked in vain for as often as the pool says."""
    idle, region = 0, load_word(pool + _REGION) - 1
    while idle < load_word(pool + _MAX_LOOKS):
        idle += 1
        if load_word(pool + _GATE) >= _OPEN and load_word(pool + _REGION) != region:
            # Who enters while the gate is open is counted, and then the region does not end before they leave.
            if add_to_word(pool + _GATE, 1) >= _OPEN:
                region = load_word(pool + _REGION)
                _call(load_word(pool + _BODY), load_word(pool + _WORK))
                idle = 0
            add_to_word(pool + _GATE, -1)
        _pause()


class Pool:
    """Helper threads, asleep until `wake`."""

    def __init__(self, num_helpers: int) -> None:
        self._memory = (ctypes.c_char * (_NUM_BYTES + 64))()
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self._help_out = ctypes.CFUNCTYPE(None, ctypes.c_int64)(c_function(_help_out))
        self._asleep: collections.deque[threading.Semaphore] = collections.deque()
        self._looks_per_us = self._measure_looks()
        for number in range(num_helpers):
            threading.Thread(target=self._run, name=f"kernel-helper-{number}", daemon=True).start()

    def _set_max_looks(self, number: int) -> None:
        ctypes.c_int64.from_address(self.address + _MAX_LOOKS).value = number

    def _measure_looks(self) -> float:
        """Looks at the gate in a microsecond; the best of a few tries, as the thread may be interrupted."""
        self._set_max_looks(_TRIAL_LOOKS)
        durations = []
        for _ in range(3):
            started = time.perf_counter()
            self._help_out(self.address)
            durations.append(time.perf_counter() - started)
        return _TRIAL_LOOKS / (1e6 * min(durations))

    def spin(self, microseconds: int) -> None:
        """How long helpers look for the next region before they sleep; 0: not at all."""
        self._set_max_looks(round(microseconds * self._looks_per_us))

    def wake(self) -> None:
        """Calls every sleeping helper."""
        while self._asleep:
            with contextlib.suppress(IndexError):  # another caller was first
                self._asleep.pop().release()

    def _run(self) -> None:
        wakes = threading.Semaphore(0)
        while True:
            self._asleep.append(wakes)
            wakes.acquire()
            self._help_out(self.address)


@functools.cache
def pool_of(num_helpers: int) -> Pool:
    """The process's pool of that size."""
    return Pool(num_helpers)
