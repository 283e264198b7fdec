"""The gated activation against the plain reference. Tolerance 4e-6 relative: exp2 of a rounded product."""

from __future__ import annotations

import pytest
import torch

from kernels.silu_mul import cpu, reference


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (1, 1536), (3, 63), (5, 100), (17, 1000)])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_matches_reference(num_rows: int, size: int, scale: float) -> None:
    gate_up = torch.randn(num_rows, 2 * size) * scale
    out, expected = torch.full((num_rows, size), torch.nan), torch.full((num_rows, size), torch.nan)
    cpu.silu_mul(gate_up, out)
    reference.silu_mul(gate_up, expected)
    torch.testing.assert_close(out, expected, rtol=4e-6, atol=1e-6)


def test_extreme_gates_stay_finite() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    out = torch.full((1, 6), torch.nan)
    cpu.silu_mul(gate_up, out)
    torch.testing.assert_close(out[0, 1:], torch.tensor([0.0, 0.0, 0.0, 90.0, 1e30]))
    assert out.isfinite().all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    gate_up = torch.randn(9, 200)
    together, alone = torch.empty(9, 100), torch.empty(1, 100)
    cpu.silu_mul(gate_up, together)
    for row in range(9):
        cpu.silu_mul(gate_up[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])
