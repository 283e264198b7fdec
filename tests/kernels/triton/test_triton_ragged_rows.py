"""Packing of ragged rows and the way back, against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.ragged_rows import reference
from kernels.ragged_rows import triton as ragged_rows

LENS = torch.tensor([3, 0, 1, -1, 2, 3, 0], dtype=torch.int32)


def index(module: object, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    row_starts = torch.full((len(LENS),), -7, dtype=torch.int32)
    request_of_row = torch.full((num_rows,), -7, dtype=torch.int32)
    module.index_rows(LENS, row_starts, request_of_row)  # type: ignore[attr-defined]
    return row_starts, request_of_row


@pytest.mark.parametrize("num_rows", [7, 9, 20])
def test_index(num_rows: int) -> None:
    expected, own = index(reference, num_rows), index(ragged_rows, num_rows)
    assert torch.equal(own[0], expected[0])
    assert torch.equal(own[1], expected[1])
    assert own[1].tolist() == ([0, 0, 0, 2, 4, 4, 5, 5, 5] + [-1] * 20)[:num_rows]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.int64), ((63,), torch.bfloat16), ((3, 700), torch.float32), ((1,), torch.int32)]
)
def test_rows_go_and_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    num_rows = 11
    source = torch.arange(7 * 3 * math.prod(shape)).view(7, 3, *shape).to(dtype)
    row_starts, request_of_row = index(ragged_rows, num_rows)
    results = []
    for module in (reference, ragged_rows):
        packed, back = torch.full((num_rows, *shape), -7, dtype=dtype), torch.full_like(source, -7)
        module.pack_rows(source, row_starts, request_of_row, packed)
        module.scatter_rows(packed, row_starts, request_of_row, back)
        results.append((packed, back))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[1][0][9:] == -7).all()
    for request, row_len in enumerate(LENS.clamp(min=0).tolist()):
        assert torch.equal(results[1][1][request, :row_len], source[request, :row_len])
        assert (results[1][1][request, row_len:] == -7).all()
