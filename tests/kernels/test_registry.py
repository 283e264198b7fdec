"""Both implementations offer the same operations with the same signatures."""

from __future__ import annotations

import inspect

from kernels.registry import load_ops


def test_implementations_have_equal_signatures() -> None:
    reference, cpu = load_ops("reference"), load_ops("cpu")
    assert load_ops("auto") == cpu
    for name in reference._fields:
        plain, compiled = getattr(reference, name), getattr(cpu, name)
        assert plain is not compiled
        assert inspect.signature(plain) == inspect.signature(compiled), name
