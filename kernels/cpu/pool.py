"""Threads that help with a kernel's work items while there are any.

The calling thread opens a region, works in it like everyone else, closes it when no item is left and waits only for
helpers that are inside. A helper that sleeps, or that the system has not scheduled, is never waited for: on a busy
machine a region costs what its caller alone would take, where joining fixed threads waits for the last to be
scheduled. Helpers spin for a while after a region (a setting), then sleep until the next one wakes them.

A helper never returns to Python: it would wait there for the GIL, which the caller holds between kernels, and go to
sleep when the next one has begun. So it sleeps in `read`, on a pipe that gets a byte for each sleeper.
"""

from __future__ import annotations

import ctypes
import functools
import os
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
_GATE, _IS_TAKEN, _REGION, _BODY, _WORK, _NUM_ASLEEP = 0, 64, 128, 136, 144, 192
_MAX_LOOKS, _READ_END, _WRITE_END, _READ, _WRITE, _BYTES, _NUM_BYTES = 256, 264, 272, 280, 288, 320, 1344
_MAX_HELPERS = _NUM_BYTES - _BYTES


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
def _transfer(typing_context: Any, function: Any, file: Any, address: Any, size: Any) -> Any:
    """`read` or `write`, called by address; bytes transferred, or -1."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_INT64, [ir.IntType(32), _INT64, _INT64])
        call = builder.inttoptr(args[0], kind.as_pointer())
        return builder.call(call, (builder.trunc(args[1], ir.IntType(32)), args[2], args[3]))

    return types.int64(types.int64, types.int64, types.int64, types.int64), emit


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
def _wake(pool: int) -> None:
    """Wakes every helper that has said that it goes to sleep."""
    if load_word(pool + _NUM_ASLEEP) != 0:
        num_asleep = swap_word(pool + _NUM_ASLEEP, 0)
        if num_asleep > 0:
            _transfer(load_word(pool + _WRITE), load_word(pool + _WRITE_END), pool + _BYTES, num_asleep)


@compiled
def run_region(pool: int, body: int, arguments: int) -> None:
    """Runs `body` until its items are done, with helpers if there is a pool (not 0) that nobody else uses just now."""
    work = _new_work(arguments)
    if pool != 0 and swap_word(pool + _IS_TAKEN, 1) == 0:
        swap_word(pool + _BODY, body)
        swap_word(pool + _WORK, work)
        add_to_word(pool + _REGION, 1)
        add_to_word(pool + _GATE, _OPEN)
        _wake(pool)
        _call(body, work)
        add_to_word(pool + _GATE, -_OPEN)
        while load_word(pool + _GATE) != 0:
            _pause()
        swap_word(pool + _IS_TAKEN, 0)
    else:
        _call(body, work)


@compiled
def _is_open(pool: int, region: int) -> bool:
    """Whether there is a region to work in, other than `region`."""
    is_open: bool = load_word(pool + _GATE) >= _OPEN and load_word(pool + _REGION) != region
    return is_open


@compiled
def _work_until_idle(pool: int, region: int) -> int:
    """Works in every region but `region`, once in each, until it has looked in vain for as often as the pool says, once
    at least; returns the last one."""
    idle = 0
    while idle == 0 or idle < load_word(pool + _MAX_LOOKS):
        idle += 1
        if _is_open(pool, region):
            # Who enters while the gate is open is counted, and then the region does not end before they leave.
            if add_to_word(pool + _GATE, 1) >= _OPEN:
                region = load_word(pool + _REGION)
                _call(load_word(pool + _BODY), load_word(pool + _WORK))
                idle = 0
            add_to_word(pool + _GATE, -1)
        _pause()
    return region


def _look(pool: int) -> None:
    _work_until_idle(pool, load_word(pool + _REGION))


def _help_out(pool: int) -> None:
    """A helper's life."""
    region = load_word(pool + _REGION) - 1
    while load_word(pool + _READ) != 0:  # always
        region = _work_until_idle(pool, region)
        add_to_word(pool + _NUM_ASLEEP, 1)
        if _is_open(pool, region):
            _wake(pool)  # whoever opened it may have seen nobody asleep
        mine = pool + _BYTES
        while _transfer(load_word(pool + _READ), load_word(pool + _READ_END), mine, 1) != 1:
            _pause()  # interrupted by a signal


class Pool:
    """Helper threads, asleep until a region opens."""

    def __init__(self, num_helpers: int) -> None:
        """Raises ValueError for more helpers than bytes to wake them with."""
        if num_helpers > _MAX_HELPERS:
            raise ValueError(f"{num_helpers} helper threads are too many: use at most {_MAX_HELPERS}")
        self._memory = (ctypes.c_char * (_NUM_BYTES + 64))()
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self._looks_per_us = self._measure_looks()
        system = ctypes.CDLL(None)
        for place, value in zip((_READ_END, _WRITE_END), os.pipe(), strict=True):
            self._set(place, value)
        for place, function in ((_READ, system.read), (_WRITE, system.write)):
            self._set(place, ctypes.cast(function, ctypes.c_void_p).value or 0)
        help_out = ctypes.CFUNCTYPE(None, ctypes.c_int64)(c_function(_help_out))
        for number in range(num_helpers):
            name = f"kernel-helper-{number}"
            threading.Thread(target=help_out, args=(self.address,), name=name, daemon=True).start()

    def _set(self, place: int, value: int) -> None:
        ctypes.c_int64.from_address(self.address + place).value = value

    def _measure_looks(self) -> float:
        """Looks at the gate in a microsecond; the best of a few tries, as the thread may be interrupted."""
        self._set(_MAX_LOOKS, _TRIAL_LOOKS)
        look = ctypes.CFUNCTYPE(None, ctypes.c_int64)(c_function(_look))
        durations = []
        for _ in range(3):
            started = time.perf_counter()
            look(self.address)
            durations.append(time.perf_counter() - started)
        return _TRIAL_LOOKS / (1e6 * min(durations))

    def spin(self, microseconds: int) -> None:
        """How long helpers look for the next region before they sleep; 0: not at all."""
        self._set(_MAX_LOOKS, round(microseconds * self._looks_per_us))


@functools.cache
def pool_of(num_helpers: int) -> Pool:
    """The process's pool of that size."""
    return Pool(num_helpers)
