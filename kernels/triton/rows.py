"""Sampling constants of many rows as device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling import SlotSampling

NOBODY = 0
"""Regime of a row that belongs to no request: kernels write nothing for it."""


class SamplingRows(NamedTuple):
    """`SlotSampling` of R requests, on the device of the logits. A captured step updates them in place."""

    regimes: Tensor
    """[R] int32: `Regime`, or NOBODY."""
    temperatures: Tensor
    """[R] float32, 1 for greedy rows."""
    top_k: Tensor
    """[R] int32"""
    top_p: Tensor
    """[R] float64"""
    min_p: Tensor
    """[R] float32"""
    keys: Tensor
    """[R] int64, the bits of the unsigned key."""

    @classmethod
    def of(cls, samplings: Sequence[SlotSampling], device: torch.device | str = "cpu") -> SamplingRows:
        """The rows of `samplings`, in that order."""

        def values(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(row, name) for row in samplings], dtype=dtype, device=device)

        return cls(
            values("regime", torch.int32),
            values("temperature", torch.float32),
            values("top_k", torch.int32),
            values("top_p", torch.float64),
            values("min_p", torch.float32),
            torch.tensor([as_signed(row.key) for row in samplings], dtype=torch.int64, device=device),
        )


def as_signed(key: int) -> int:
    """A 64-bit key's bits as a signed number."""
    return key - (1 << 64) if key >> 63 else key
