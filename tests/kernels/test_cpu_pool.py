"""Helper threads of the compiled kernels: same bits from any thread at once, and no thread needed to make progress."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.cpu import native, pool
from kernels.linear import make_linear
from kernels.registry import use_threads


def test_callers_at_once_get_what_each_gets_alone() -> None:
    """In one process both engines' threads call kernels; one of them has the helpers, the other works alone."""
    linear = make_linear(torch.randn(1500, 200), None, "fp16")
    inputs = [torch.randn(1 + number % 5, 200) for number in range(40)]
    expected = [linear(x) for x in inputs]
    with ThreadPoolExecutor(3) as callers:
        results = list(callers.map(linear, inputs * 10))
    assert all(torch.equal(result, expected[number % 40]) for number, result in enumerate(results))


def test_kernels_finish_without_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that never come are not waited for."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    linear, x = make_linear(torch.randn(1500, 200), None, "fp16"), torch.randn(3, 200)
    threads = native.num_threads()
    try:
        native.set_num_threads(7)  # a pool of a size that no other test has
        alone = linear(x)
        native.set_num_threads(1)
        assert torch.equal(linear(x), alone)
    finally:
        native.set_num_threads(threads)


def test_helpers_sleep_and_wake_while_the_caller_holds_the_gil() -> None:
    """One that had to ask Python for its sleep would still be on its way there when the next kernel has begun."""
    helpers, linear, x = pool.pool_of(2), make_linear(torch.randn(1500, 200), None, "fp16"), torch.randn(3, 200)
    threads, interval = native.num_threads(), sys.getswitchinterval()
    num_asleep = ctypes.c_int64.from_address(helpers.address + pool._NUM_ASLEEP)
    try:
        sys.setswitchinterval(1000.0)
        for _ in range(3):
            use_threads(3, 1)
            linear(x)
            deadline = time.perf_counter() + 60.0
            while num_asleep.value < 2 and time.perf_counter() < deadline:
                pass
            assert num_asleep.value == 2
            use_threads(3, 60_000_000)
            linear(x)
            assert num_asleep.value == 0
    finally:
        use_threads(3, 0)
        sys.setswitchinterval(interval)
        native.set_num_threads(threads)


def test_helpers_look_for_work_as_long_as_asked() -> None:
    helpers, linear, x = pool.pool_of(2), make_linear(torch.randn(1500, 200), None, "fp16"), torch.randn(3, 200)
    alone = linear(x)
    threads = native.num_threads()

    def max_looks() -> int:
        return int.from_bytes(ctypes.string_at(helpers.address + pool._MAX_LOOKS, 8), "little")

    try:
        for spin_us in (0, 500):
            use_threads(3, spin_us)
            assert all(torch.equal(linear(x), alone) for _ in range(20))
            looks = max_looks()
        assert looks > 0
        use_threads(3, 0)
        assert max_looks() == 0
    finally:
        native.set_num_threads(threads)
