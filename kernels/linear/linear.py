"""Linear layers in float32, or with weights packed as float16 (float32 activations and accumulation)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels.linear import cpu

WeightFormat = Literal["float32", "fp16"]

_DTYPES = {"float32": torch.float32, "fp16": torch.float16}


class Linear:
    """y = x Wᵀ + b. A row's result never depends on the rows beside it, nor on the number of threads."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> None:
        self._num_out, self._num_in = weight.shape
        self._packed = cpu.pack(weight, _DTYPES[weight_format])
        if not self._packed.isfinite().all():
            raise ValueError(f"a weight is not a finite number in {weight_format}: use weight format float32")
        self._bias = None if bias is None else bias.float().contiguous()
        self.weight_bytes = self._packed.numel() * self._packed.element_size()
        """Bytes read to compute any number of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [M, K]; returns [M, N]."""
        num_rows, num_in = x.shape
        if num_in != self._num_in:
            raise ValueError(f"rows of {num_in} elements given to a linear layer of {self._num_in} inputs")
        out = torch.empty(num_rows, self._num_out)
        cpu.linear(x.contiguous(), self._packed, self._bias, out)
        return out

    def padded_rows(self, num_rows: int) -> int:
        """Rows that are really computed for `num_rows` rows: no padding here."""
        return num_rows


def make_linear(weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> Linear:
    """Packs weight [N, K] and bias [N]. Raises ValueError if a weight does not fit the format."""
    return Linear(weight, bias, weight_format)
