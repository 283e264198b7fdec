"""SwiGLU's activation in plain torch (Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out = silu(gate) · up; gate_up [M, 2I] holds gate, then up; out [M, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)
