"""Memory of K/V pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def zero_pages(*shape: int) -> Tensor:
    """Zeros, float32, whose memory the system commits when it is first written: torch.zeros would write all of it.

    Raises MemoryError if the address space or the system's limits do not allow it.
    """
    return torch.from_numpy(np.zeros(shape, np.float32))
