"""RMSNorm in Triton against the plain reference, which gets float32. Tolerances: a few roundings of the type."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import reference, triton

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 63), (2, 1000)])
def test_matches_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta, weight = (torch.randn(*shape).to(dtype) for shape in ((num_rows, size), (num_rows, size), (size,)))
    out, residual, expected = torch.full_like(x, torch.nan), x.clone(), torch.empty(num_rows, size)
    triton.rms_norm(x, weight, 1e-5, out)
    reference.rms_norm(x.float(), weight.float(), 1e-5, expected)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    triton.add_rms_norm(residual, delta, weight, 1e-5, out.fill_(torch.nan))
    ulp = (
        2**-7 if dtype == torch.bfloat16 else 0.0
    )  # the interpreter rounds towards zero to that type, a GPU to nearest
    torch.testing.assert_close(residual, x + delta, rtol=ulp, atol=0.0)
    reference.rms_norm(residual.float(), weight.float(), 1e-5, expected)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_a_row_does_not_depend_on_its_batch_or_on_where_it_lies() -> None:
    x, delta, weight = torch.randn(5, 200)[:, :100], torch.randn(5, 100), torch.randn(100)
    residual, together, alone = x.clone(), torch.empty(5, 100), torch.empty(1, 100)
    triton.add_rms_norm(residual, delta, weight, 1e-5, together)
    for row in range(5):
        own = x[row : row + 1].clone()
        triton.add_rms_norm(own, delta[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], together[row])
    triton.rms_norm(residual, weight, 1e-5, residual)
    assert torch.equal(residual, together)


def test_no_rows_and_rows_in_pieces() -> None:
    triton.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5, torch.empty(0, 8))
    with pytest.raises(ValueError, match="neighbours"):
        triton.rms_norm(torch.ones(8, 4).T, torch.ones(8), 1e-5, torch.empty(4, 8))
