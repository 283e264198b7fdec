"""Linear layers over levels in plain torch: rows rounded to int8 in groups, products in float64."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [M, K] to integers of -127 … 127 [M, K / 32, 32] and the groups' scales [M, K / 32], both float64."""
    groups = x.view(len(x), -1, GROUP)
    largest = groups.abs().amax(-1)
    inverse = torch.div(torch.full_like(largest, 127), largest)  # `127 / largest` would round twice
    integers = (groups * torch.where(largest == 0, largest, inverse)[..., None]).round()
    return integers.double(), (largest * torch.tensor(1 / 127, dtype=torch.float32)).double()


def levels_product(x: Tensor, levels: Tensor, scales: Tensor, minimums: Tensor | None) -> Tensor:
    """x float32 [M, K] times the weights scale · level + minimum [N, K], as `make_quantized_linear` takes them.

    Returns float64 [M, N].
    """
    integers, row_scales = round_rows(x)
    sums = torch.einsum("mgk,ngk->mng", integers, levels.double().view(len(levels), -1, GROUP))
    product = (sums * scales.double() * row_scales[:, None]).sum(-1)
    if minimums is None:
        return product
    return product + (integers.sum(-1) * row_scales) @ minimums.double().T
