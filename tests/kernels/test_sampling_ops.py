"""Every implementation offers the same sampling operations with the same signatures."""

from __future__ import annotations

import inspect

import pytest

from kernels.registry import Implementation
from kernels.sampling_ops import load_sampling_ops


@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_implementations_have_equal_signatures(kind: Implementation) -> None:
    if kind == "triton":
        pytest.importorskip("triton.language")
    reference, other = load_sampling_ops("reference"), load_sampling_ops(kind)
    for name in reference._fields:
        plain, own = getattr(reference, name), getattr(other, name)
        assert plain is not own
        assert inspect.signature(plain) == inspect.signature(own), name
    assert load_sampling_ops("auto") == load_sampling_ops("cpu")
