"""Both implementations offer the same operations with the same signatures."""

from __future__ import annotations

import inspect

import pytest

from kernels.cpu.jit import compiled
from kernels.linear import floats, levels
from kernels.registry import load_ops


def test_implementations_have_equal_signatures() -> None:
    reference, cpu = load_ops("reference"), load_ops("cpu")
    assert load_ops("auto") == cpu
    for name in (field for field in reference._fields if callable(getattr(reference, field))):
        plain, compiled = getattr(reference, name), getattr(cpu, name)
        assert plain is not compiled
        assert inspect.signature(plain) == inspect.signature(compiled), name


def test_triton_has_the_signatures_of_the_reference() -> None:
    pytest.importorskip("triton.language", reason="Triton is not installed")
    reference, triton = load_ops("reference"), load_ops("triton")
    assert not triton.is_compiled
    for name in (field for field in reference._fields if callable(getattr(reference, field))):
        plain, other = getattr(reference, name), getattr(triton, name)
        assert plain is not other
        assert inspect.signature(plain) == inspect.signature(other), name


def test_functions_of_one_factory_have_names_of_their_own() -> None:
    """Compiled code from the cache is linked by name: equal names once sent a call to another format's loop."""
    runs = floats._run_float32, floats._run_float16, levels._run_q4, levels._run_q8
    assert len({run.py_func.__qualname__ for run in runs}) == len(runs)

    def make(inner: object) -> object:
        return compiled(lambda: inner)

    assert make(runs[0]).py_func.__qualname__ != make(runs[1]).py_func.__qualname__  # type: ignore[attr-defined]
