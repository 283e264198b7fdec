"""Linear layers with float32 or float16 weights, or with weights of 4 or 8 bit levels (and activations of 8)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels.cpu.integers import GROUP
from kernels.cpu.native import Kernel
from kernels.linear import floats, levels

WeightFormat = Literal["float32", "fp16"]

_FORMATS = {"float32": (torch.float32, floats.FLOAT32), "fp16": (torch.float16, floats.FLOAT16)}


class Linear:
    """y = x Wᵀ + b. A row's result never depends on the rows beside it, nor on the number of threads."""

    def __init__(self, shape: tuple[int, int], packed: Tensor, kernel: Kernel, bias: Tensor | None) -> None:
        """Weights [N, K] = `shape`, packed as `kernel` reads them."""
        self.num_out, self.num_in = shape
        self._packed, self._kernel = packed, kernel
        self._bias = None if bias is None else bias.float().contiguous()
        self.weight_bytes = packed.numel() * packed.element_size()
        """Bytes read to compute any number of rows."""

        self.exact_counts: tuple[int, ...] = ()
        """Row counts to pad to, ascending, where a self-test finds that others change bits; empty for no padding."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x float32 [M, K]; returns [M, N], which is `out` if that is given."""
        if out is None:
            out = torch.empty(len(x), self.num_out)
        num_rows, num_in = x.shape
        if num_in != self.num_in:
            raise ValueError(f"rows of {num_in} elements given to a linear layer of {self.num_in} inputs")
        if not (self.exact_counts and num_rows):
            return self._multiply(x, out)
        counts = self._padded_counts(num_rows)
        padded = torch.cat([x, x.new_zeros(sum(counts) - num_rows, num_in)])
        parts = [self._multiply(part, torch.empty(len(part), self.num_out)) for part in torch.split(padded, counts)]
        return out.copy_(torch.cat(parts)[:num_rows])

    def _multiply(self, x: Tensor, out: Tensor) -> Tensor:
        multiply = levels.linear if self._kernel in (levels.Q4, levels.Q8) else floats.linear
        multiply(self._kernel, x.contiguous(), self._packed, self._bias, out)
        return out

    def _padded_counts(self, num_rows: int) -> list[int]:
        """As many rows as the largest exact count, again and again, then the fewest that hold the rest."""
        largest = self.exact_counts[-1]
        whole, rest = divmod(num_rows, largest)
        return [largest] * whole + ([min(count for count in self.exact_counts if count >= rest)] if rest else [])

    def padded_rows(self, num_rows: int) -> int:
        """Rows that are really computed for `num_rows` rows."""
        return sum(self._padded_counts(num_rows)) if self.exact_counts else num_rows


def make_linear(weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> Linear:
    """Packs weight [N, K] and bias [N]. Raises ValueError if a weight does not fit the format."""
    dtype, kernel = _FORMATS[weight_format]
    packed = floats.pack(weight, dtype)
    if not packed.isfinite().all():
        raise ValueError(f"a weight is not a finite number in {weight_format}: use weight format float32")
    num_out, num_in = weight.shape
    return Linear((num_out, num_in), packed, kernel, bias)


def make_quantized_linear(
    weight_levels: Tensor, scales: Tensor, minimums: Tensor | None, bias: Tensor | None
) -> Linear:
    """Packs weights given as levels, with a scale (and minimum) for each group of 32 inputs of an output.

    With minimums, levels are uint8 [N, K] from 0 to 15 and a weight is scale · level + minimum; without, levels are
    int8 and a weight is scale · level. Scales and minimums are float16 [N, K / 32].
    Raises ValueError if K is not a multiple of 32, or scales or minimums have another shape or are not finite.
    """
    num_out, num_in = weight_levels.shape
    if num_in % GROUP:
        raise ValueError(f"{num_in} inputs do not divide into groups of {GROUP}: use weight format fp16")
    for part in (scales, minimums):
        if part is not None and part.shape != (num_out, num_in // GROUP):
            raise ValueError(
                f"scales are {list(part.shape)} for levels {list(weight_levels.shape)}: one for {GROUP} inputs"
            )
        if part is not None and not part.isfinite().all():
            raise ValueError("a scale or minimum is not a finite number: the levels are damaged")
    if minimums is None:
        return Linear((num_out, num_in), levels.pack_q8(weight_levels, scales), levels.Q8, bias)
    return Linear((num_out, num_in), levels.pack_q4(weight_levels, scales, minimums), levels.Q4, bias)
