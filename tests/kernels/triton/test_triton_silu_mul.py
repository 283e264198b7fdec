"""The gated activation in Triton against the plain reference, which gets float32."""

from __future__ import annotations

import pytest
import torch

from kernels.silu_mul import reference, triton

TOLERANCES = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 63), (2, 1100)])
def test_matches_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(num_rows, 2 * size) * 4).to(dtype)
    out, expected = torch.full((num_rows, size), torch.nan, dtype=dtype), torch.empty(num_rows, size)
    triton.silu_mul(gate_up, out)
    reference.silu_mul(gate_up.float(), expected)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_extreme_gates_stay_finite_and_rows_are_their_own() -> None:
    gate_up = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 10])
    out, alone = torch.full((2, 5), torch.nan), torch.full((1, 5), torch.nan)
    triton.silu_mul(gate_up, out)
    torch.testing.assert_close(out[0], torch.tensor([0.0, 0.0, 0.0, 90.0, 1e30]))
    triton.silu_mul(gate_up[1:], alone)
    assert torch.equal(alone[0], out[1])
