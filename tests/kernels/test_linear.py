"""Linear layers: right to 1e-5 of a float64 product with the same weights, and exact at any row count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu import native
from kernels.linear import Linear, WeightFormat, make_linear, make_quantized_linear, reference

SHAPES = [(1, 1), (63, 100), (100, 63), (960, 576), (1000, 1537)]
QUANTISED_SHAPES = [(1, 32), (63, 96), (100, 64), (960, 576), (1001, 1536)]
DTYPES = {"float32": torch.float32, "fp16": torch.float16}


def quantized(
    num_bits: int, num_out: int, num_in: int, bias: Tensor | None = None
) -> tuple[Linear, Callable[[Tensor], Tensor]]:
    """A layer of random levels, and its product in float64 as `reference.py` has it."""
    is_q4 = num_bits == 4
    levels = torch.randint(*((0, 16) if is_q4 else (-128, 128)), (num_out, num_in))
    scales, minimums = (torch.randn(2, num_out, num_in // 32) / num_in**0.5 / 2 ** (num_bits - 1)).half()
    offsets = minimums * 8 if is_q4 else None
    kept = levels.to(torch.uint8 if is_q4 else torch.int8)
    linear = make_quantized_linear(kept, scales, offsets, bias)
    return linear, lambda x: reference.levels_product(x, kept, scales, offsets)


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


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize(("num_out", "num_in"), QUANTISED_SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_levels_match_float64(num_bits: int, num_out: int, num_in: int, has_bias: bool) -> None:
    bias = torch.randn(num_out) if has_bias else None
    linear, product = quantized(num_bits, num_out, num_in, bias)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 19):
        x = torch.randn(num_rows, num_in)
        expected = product(x) + (0 if bias is None else bias.double())
        torch.testing.assert_close(linear(x), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_bits", [4, 8])
def test_levels_take_extreme_rows(num_bits: int) -> None:
    linear, product = quantized(num_bits, 40, 64)
    x = torch.randn(6, 64)
    x[0] = 0.0
    x[1, :32] = 0.0
    x[2, 3] = 1e30
    x[3, 5] = 1e-30
    torch.testing.assert_close(linear(x), product(x).float(), rtol=1e-3, atol=1e-5)
    expected = linear(x)
    x[4, 7], x[5, 40] = torch.nan, -torch.inf
    found = linear(x)
    assert torch.equal(found[:4], expected[:4])
    assert not found[4:].isfinite().any()


def make_any(kind: str, num_out: int, num_in: int) -> Linear:
    if kind in ("q4", "q8"):
        return quantized(int(kind[1]), num_out, num_in)[0]
    return make_linear(torch.randn(num_out, num_in), torch.randn(num_out), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["float32", "fp16", "q4", "q8"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_are_exact_at_any_count_and_place(kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = make_any(kind, 203, 576)
    x = torch.randn(140, 576, generator=generator)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (*range(1, 34), 48, 64, 128, 140):  # whole tiles, the most at once, and more
        order = torch.randperm(140, generator=generator)[:num_rows]
        assert torch.equal(linear(x[order]), alone[order]), num_rows
        assert linear.padded_rows(num_rows) == num_rows


@pytest.mark.parametrize("kind", ["float32", "fp16", "q4", "q8"])
def test_threads_do_not_change_bits(kind: str) -> None:
    linear, x = make_any(kind, 2000, 320), torch.randn(5, 320)
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
    assert quantized(4, 64, 96)[0].weight_bytes == 64 * 96 * 5 // 8
    assert quantized(8, 64, 96)[0].weight_bytes == 64 * (96 + 3 * 2)


def test_bad_weights_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        make_linear(torch.full((2, 2), 1e5), None, "fp16")
    with pytest.raises(ValueError, match="3 elements"):
        make_linear(torch.ones(2, 2), None, "fp16")(torch.ones(1, 3))


def test_bad_levels_are_refused() -> None:
    levels, scales = torch.ones(2, 48, dtype=torch.int8), torch.ones(2, 1, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"48 inputs .* groups of 32: use weight format fp16"):
        make_quantized_linear(levels, scales, None, None)
    with pytest.raises(ValueError, match="not a finite number"):
        make_quantized_linear(levels[:, :32], scales, scales * torch.inf, None)
    with pytest.raises(ValueError, match=r"scales are \[2, 1\]"):
        make_quantized_linear(torch.ones(2, 64, dtype=torch.int8), scales, None, None)
