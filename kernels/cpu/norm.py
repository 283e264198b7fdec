"""The part of RMSNorm that normed heads and normed rows share, and how operations along rows share their rows."""

from __future__ import annotations

import math
from typing import Any

from kernels.cpu.jit import compiled, types
from kernels.cpu.simd import LANES, fma, load_part, splat, sum_lanes

PARALLEL_ELEMENTS = 1 << 15
"""Elements above which a second thread pays for an operation along rows."""
ROWS_OF_ITEM = 4
"""Rows that a thread takes at a time."""


@compiled
def inverse_rms(base: int, start: int, size: int, eps: float) -> Any:
    """1 / sqrt(mean of squares + eps) of `size` elements from `start`."""
    total = splat(0.0)
    for offset in range(0, size, LANES):
        part = load_part(base, start + offset, size - offset)
        total = fma(part, part, total)
    return types.float32(1.0 / math.sqrt(sum_lanes(total) / size + eps))
