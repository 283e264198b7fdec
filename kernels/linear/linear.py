"""Linear layers in float32, or with packed weights: float16, or 4 or 8 bit levels (float32 activations and sums)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels.cpu.native import Kernel
from kernels.linear import cpu

WeightFormat = Literal["float32", "fp16"]

_FORMATS = {"float32": (torch.float32, cpu.FLOAT32), "fp16": (torch.float16, cpu.FLOAT16)}


class Linear:
    """y = x Wᵀ + b. A row's result never depends on the rows beside it, nor on the number of threads."""

    def __init__(self, shape: tuple[int, int], packed: Tensor, kernel: Kernel, bias: Tensor | None) -> None:
        """Weights [N, K] = `shape`, packed as `kernel` reads them."""
        self._num_out, self._num_in = shape
        self._packed, self._kernel = packed, kernel
        self._bias = None if bias is None else bias.float().contiguous()
        self.weight_bytes = packed.numel() * packed.element_size()
        """Bytes read to compute any number of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [M, K]; returns [M, N]."""
        num_rows, num_in = x.shape
        if num_in != self._num_in:
            raise ValueError(f"rows of {num_in} elements given to a linear layer of {self._num_in} inputs")
        out = torch.empty(num_rows, self._num_out)
        cpu.linear(self._kernel, x.contiguous(), self._packed, self._bias, out)
        return out

    def padded_rows(self, num_rows: int) -> int:
        """Rows that are really computed for `num_rows` rows: no padding here."""
        return num_rows


def make_linear(weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> Linear:
    """Packs weight [N, K] and bias [N]. Raises ValueError if a weight does not fit the format."""
    dtype, kernel = _FORMATS[weight_format]
    packed = cpu.pack(weight, dtype)
    if not packed.isfinite().all():
        raise ValueError(f"a weight is not a finite number in {weight_format}: use weight format float32")
    num_out, num_in = weight.shape
    return Linear((num_out, num_in), packed, kernel, bias)


def make_quantized_linear(levels: Tensor, scales: Tensor, minimums: Tensor | None, bias: Tensor | None) -> Linear:
    """Packs weights given as levels, with a scale (and minimum) for each group of 32 inputs of an output.

    With minimums, levels are uint8 [N, K] from 0 to 15 and a weight is scale · level + minimum, rounded once to
    float32; without, levels are int8 and a weight is scale · level. Scales and minimums are float16 [N, K / 32].
    Raises ValueError if K is not a multiple of 32, or scales or minimums have another shape or are not finite.
    """
    num_out, num_in = levels.shape
    if num_in % cpu.GROUP:
        raise ValueError(f"{num_in} inputs do not divide into groups of {cpu.GROUP}: use weight format fp16")
    for part in (scales, minimums):
        if part is not None and part.shape != (num_out, num_in // cpu.GROUP):
            raise ValueError(
                f"scales are {list(part.shape)} for levels {list(levels.shape)}: one for {cpu.GROUP} inputs"
            )
        if part is not None and not part.isfinite().all():
            raise ValueError("a scale or minimum is not a finite number: the levels are damaged")
    if minimums is None:
        return Linear((num_out, num_in), cpu.pack_q8(levels, scales), cpu.Q8, bias)
    return Linear((num_out, num_in), cpu.pack_q4(levels, scales, minimums), cpu.Q4, bias)
