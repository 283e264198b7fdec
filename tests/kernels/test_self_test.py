"""Finding the row counts at which a layer is exact, on layers that are made to be inexact; and padding to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.linear import Linear, make_linear
from kernels.self_test import COUNTS, exact_counts, same_bits

NUM_IN = 48


def layer() -> Linear:
    return make_linear(torch.randn(40, NUM_IN, generator=torch.Generator().manual_seed(3)), None, "float32")


def off_by_a_bit(exact: Callable[[Tensor], Tensor], is_off: Callable[[int], bool]) -> Callable[[Tensor], Tensor]:
    """The layer, with the last bit of one element changed where the row count says so."""

    def run(x: Tensor) -> Tensor:
        result = exact(x)
        if is_off(len(x)):
            result.view(torch.int32)[:, 7] ^= 1
        return result

    return run


def test_compiled_layers_are_exact_at_every_count() -> None:
    assert exact_counts(layer(), NUM_IN) == COUNTS


@pytest.mark.parametrize("kept", [[count for count in COUNTS if count not in (1, 2, 7, 14)], [*range(1, 17)]])
def test_the_largest_set_of_counts_that_agree_is_found(kept: Sequence[int]) -> None:
    """The others agree with each other, too, but are fewer."""
    assert exact_counts(off_by_a_bit(layer(), lambda count: count not in kept), NUM_IN) == tuple(kept)


def test_rows_that_depend_on_their_place_or_neighbours_are_never_exact() -> None:
    exact = layer()

    def by_place(x: Tensor) -> Tensor:
        return exact(x) + torch.arange(len(x))[:, None] * 1e-6

    def by_neighbour(x: Tensor) -> Tensor:
        return exact(x) + 1e-6 * exact(x.roll(1, 0))

    assert exact_counts(by_place, NUM_IN) == (1,)  # alone, a row has no place
    assert exact_counts(by_neighbour, NUM_IN, counts=range(3, 9)) == ()


def test_padded_layers_give_each_row_what_it_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Linear._multiply
    counts: list[int] = []

    def multiply(self: Linear, x: Tensor, out: Tensor) -> Tensor:
        counts.append(len(x))
        return off_by_a_bit(lambda x: exact(self, x, out), lambda count: count in (1, 2, 3, 5, 9, 17, 33))(x)

    monkeypatch.setattr(Linear, "_multiply", multiply)
    linear, x = layer(), torch.randn(70, NUM_IN)
    linear.exact_counts = exact_counts(linear, NUM_IN)
    assert linear.exact_counts == (4, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 64)
    whole = linear(x)
    assert whole.shape == (70, 40)
    for num_rows in (1, 2, 5, 16, 17, 33, 65, 69):
        counts.clear()
        assert same_bits(linear(x[:num_rows]), whole[:num_rows])
        assert sum(counts) == linear.padded_rows(num_rows)
        assert set(counts) <= set(linear.exact_counts)
    assert linear.padded_rows(1) == 4
    assert linear.padded_rows(9) == 10
    assert linear.padded_rows(65) == 68
    assert linear(x[:0]).shape == (0, 40)


def test_same_bits_tells_zeros_apart_and_knows_nan() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
