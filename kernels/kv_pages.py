"""Memory of K/V pages."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LINE = 64
_NUMPY_TYPES = {torch.float32: np.float32, torch.float16: np.float16}


def page_type(weight_format: str, kernels: str) -> torch.dtype:
    """What pages hold on a CPU: float16 beside weights of 16 bits or fewer, float32 beside float32.

    Triton's kernels, in the interpreter, read pages of the rows' type, which is float32.
    """
    return torch.float32 if weight_format == "float32" or kernels == "triton" else torch.float16


def zero_pages(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, from the beginning of a cache line on, so that vectors of a page lie in one.

    On the CPU the system commits memory when it is first written: torch.zeros would write all of it.
    Raises MemoryError (torch's RuntimeError on a device) if the limits do not allow it.
    """
    if device.type == "cpu" and dtype in _NUMPY_TYPES:
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = np.zeros(num_bytes + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        return torch.from_numpy(memory[start : start + num_bytes].view(_NUMPY_TYPES[dtype]).reshape(shape))
    return torch.zeros(shape, dtype=dtype, device=device)
