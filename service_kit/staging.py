"""Inputs and outputs of captured steps: many small arrays in one block of memory, so that a step moves two copies.

A captured step reads its inputs where they were when it was captured; the host fills the same arrays step after step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16
_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Field(NamedTuple):
    """One array."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike = np.int32


class Staging:
    """The same arrays twice: `host` for numpy, in memory that a device can read by itself, and `device` for kernels."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        """Zeroed arrays by name."""
        sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in fields.items()}
        starts, end = {}, 0
        for name, size in sizes.items():
            starts[name] = end
            end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
        self._on_host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(end, dtype=torch.uint8, device=device)
        self.num_bytes = end
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (shape, dtype) in fields.items():
            own = slice(starts[name], starts[name] + sizes[name])
            self.host[name] = self._on_host[own].numpy().view(np.dtype(dtype)).reshape(shape)
            self.device[name] = self._on_device[own].view(_TORCH_TYPES[np.dtype(dtype)]).view(shape)

    def upload(self) -> None:
        """Starts the copy from host to device."""
        self._on_device.copy_(self._on_host, non_blocking=True)

    def upload_first(self, name: str, count: int) -> None:
        """Starts the copy of the first `count` entries of one array alone."""
        self.device[name][:count].copy_(torch.from_numpy(self.host[name][:count]), non_blocking=True)

    def download(self) -> None:
        """Starts the copy from device to host; `GraphRunner.synchronize` before `host` is read."""
        self._on_host.copy_(self._on_device, non_blocking=True)
