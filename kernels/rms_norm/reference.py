"""RMSNorm in plain torch (Zhang & Sennrich 2019, as Llama uses it)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight along the last axis; x, out [M, H], weight [H]. `out` may be `x`."""
    out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += delta in place, then out = rms_norm(residual); all [M, H], weight [H]."""
    residual.add_(delta)
    rms_norm(residual, weight, eps, out)
