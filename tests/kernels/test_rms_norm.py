"""RMSNorm against the plain reference. Tolerance 2e-6 relative: a few roundings of float32."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import cpu, reference


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (1, 576), (3, 63), (5, 100), (17, 1000)])
def test_matches_reference(num_rows: int, size: int) -> None:
    x, delta, weight = torch.randn(num_rows, size) * 3, torch.randn(num_rows, size), torch.randn(size)
    out, expected = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    cpu.rms_norm(x, weight, 1e-5, out)
    reference.rms_norm(x, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)
    residual, expected_residual = x.clone(), x.clone()
    cpu.add_rms_norm(residual, delta, weight, 1e-5, out)
    reference.add_rms_norm(expected_residual, delta, weight, 1e-5, expected)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [63, 576, 5000])
def test_a_row_does_not_depend_on_its_batch(size: int) -> None:
    x, delta, weight = torch.randn(9, size), torch.randn(9, size), torch.randn(size)
    together, residual = torch.empty_like(x), x.clone()
    cpu.add_rms_norm(residual, delta, weight, 1e-5, together)
    for row in range(9):
        alone, own = torch.empty(1, size), x[row : row + 1].clone()
        cpu.add_rms_norm(own, delta[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], together[row])
        cpu.rms_norm(own, weight, 1e-5, alone)
        assert torch.equal(alone[0], together[row])


def test_output_may_be_the_input() -> None:
    x, weight = torch.randn(4, 100), torch.randn(100)
    out = torch.empty_like(x)
    cpu.rms_norm(x, weight, 1e-6, out)
    cpu.rms_norm(x, weight, 1e-6, x)
    assert torch.equal(x, out)
