"""SwiGLU's activation for GPUs (see `reference.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, out_stride, size, BLOCK: tl.constexpr):
    """A block of one row; computed in float32."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate_ptr = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size, mask=mask, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # of the argument's negative size alone: nothing overflows
    out = gate * (tl.where(gate < 0, small, 1.0) / (1.0 + small)) * up
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """See `reference.silu_mul`."""
    num_rows, size = out.shape
    if gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("elements of a row must be neighbours in memory")
    if num_rows:
        silu_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, gate_up.stride(0), out.stride(0), size, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
        )
