"""Linear layers: right to 1e-5 of a float64 product with the same weights, and exact at any row count."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.cpu import native
from kernels.linear import WeightFormat, make_linear

SHAPES = [(1, 1), (63, 100), (100, 63), (960, 576), (1000, 1537)]
DTYPES = {"float32": torch.float32, "fp16": torch.float16}


@pytest.mark.parametrize("weight_format", ["float32", "fp16"])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_matches_float64(weight_format: WeightFormat, num_out: int, num_in: int, has_bias: bool) -> None:
    weight, bias = torch.randn(num_out, num_in) / num_in**0.5, torch.randn(num_out) if has_bias else None
    linear = make_linear(weight, bias, weight_format)
    stored = weight.to(DTYPES[weight_format]).double()
    for num_rows in (1, 5, 19):
        x = torch.randn(num_rows, num_in)
        expected = functional.linear(x.double(), stored, None if bias is None else bias.double())
        torch.testing.assert_close(linear(x), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_format", ["float32", "fp16"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_exact_at_any_count_and_place(weight_format: WeightFormat, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = make_linear(torch.randn(200, 576, generator=generator), torch.randn(200), weight_format)
    x = torch.randn(96, 576, generator=generator)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (*range(1, 34), 48, 64, 96):
        order = torch.randperm(96, generator=generator)[:num_rows]
        assert torch.equal(linear(x[order]), alone[order]), num_rows
        assert linear.padded_rows(num_rows) == num_rows


def test_threads_do_not_change_bits() -> None:
    linear, x = make_linear(torch.randn(2000, 300), None, "fp16"), torch.randn(5, 300)
    threads = native.num_threads()
    try:
        native.set_num_threads(1)
        expected = linear(x)
        native.set_num_threads(2)
        assert torch.equal(linear(x), expected)
    finally:
        native.set_num_threads(threads)


def test_rows_may_be_a_view() -> None:
    linear, x = make_linear(torch.randn(40, 30), None, "float32"), torch.randn(6, 60)
    assert torch.equal(linear(x[:, ::2]), linear(x[:, ::2].contiguous()))


def test_bytes_count_the_packed_weights() -> None:
    weight = torch.randn(64, 100)
    assert make_linear(weight, None, "fp16").weight_bytes == 64 * 100 * 2
    assert make_linear(weight, None, "float32").weight_bytes == 64 * 100 * 4


def test_bad_weights_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        make_linear(torch.full((2, 2), 1e5), None, "fp16")
    with pytest.raises(ValueError, match="3 elements"):
        make_linear(torch.ones(2, 2), None, "fp16")(torch.ones(1, 3))
