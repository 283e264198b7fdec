"""Memory of K/V pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def zero_pages(*shape: int, like: Tensor | None = None) -> Tensor:
    """Zeros with the device and type of `like`; float32 on the CPU without it.

    On the CPU the system commits float32 memory when it is first written: torch.zeros would write all of it.
    Raises MemoryError (torch's RuntimeError on a device) if the limits do not allow it.
    """
    if like is None or (like.device.type == "cpu" and like.dtype == torch.float32):
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
