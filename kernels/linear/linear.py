"""Linear layers in float32 or with weights packed as float16 (float32 activations and accumulation)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

WeightFormat = Literal["float32", "fp16"]


class Linear:
    """y = x Wᵀ + b for float32 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias) if weight_format == "fp16" else None
        self._weight = weight
        self._bias = bias
        self.weight_bytes = weight.numel() * (4 if self._packed is None else 2)
        """Bytes read to compute one row."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [M, K]; returns [M, N]."""
        if self._packed is None:
            return torch.nn.functional.linear(x, self._weight, self._bias)
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)

    def padded_rows(self, num_rows: int) -> int:
        """Rows that are really computed for `num_rows` rows."""
        return num_rows


def make_linear(
    weight: Tensor, bias: Tensor | None, weight_format: WeightFormat, cache_dir: Path | None = None
) -> Linear:
    """Packs weight [N, K] and bias [N]; `cache_dir` keeps the results of the row-exactness self-test."""
    return Linear(weight, bias, weight_format)
