"""Linear layers of a device's own library: cuBLAS on a GPU. A row's bits may depend on how many rows there are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear.linear import Linear


class Placement(NamedTuple):
    """Where the tensors of a model are, and of what type."""

    device: torch.device
    dtype: torch.dtype

    def put(self, tensor: Tensor) -> Tensor:
        """A copy there."""
        return tensor.to(self.device, self.dtype)


class DenseLinear(Linear):
    """y = x Wᵀ + b in the weights' own type, on their device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, placement: Placement) -> None:
        """Weight [N, K] and bias [N], which are copied to `placement`."""
        self.num_out, self.num_in = weight.shape
        self._weight = placement.put(weight)
        self._bias = None if bias is None else placement.put(bias)
        self.weight_bytes = weight.numel() * self._weight.element_size()
        self.exact_counts = ()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, K] on the weights' device; returns [M, N], which is `out` if that is given."""
        if out is None:
            out = x.new_empty(len(x), self.num_out)
        if self._bias is None:
            return torch.mm(x, self._weight.t(), out=out)
        return torch.addmm(self._bias, x, self._weight.t(), out=out)
