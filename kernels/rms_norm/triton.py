"""RMSNorm for GPUs: one program a row, sums in float32 (see `reference.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    delta_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x += delta unless delta_ptr is None, rounded to x's type; then out = x / rms(x) · weight."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < SIZE
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + row * delta_stride + column, mask=mask, other=0.0).to(tl.float32)
        residual = (x + delta).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + column, residual, mask=mask)
        x = residual.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    num_rows, size = x.shape
    if not (x.stride(1) == weight.stride(0) == out.stride(1) == 1) or (delta is not None and delta.stride(1) != 1):
        raise ValueError("elements of a row and of the weight must be neighbours in memory")
    if not num_rows:
        return
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        delta,
        weight,
        out,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        out.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=False,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `reference.rms_norm`."""
    _launch(x, None, weight, eps, out)


def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `reference.add_rms_norm`."""
    _launch(residual, delta, weight, eps, out)
