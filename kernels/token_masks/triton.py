"""Masks of windows: one pass over the logits; each program reads the words of its tile's tokens. Equal to the reference
bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_VOCAB = 4096


@triton.jit
def _is_allowed(mask_ptr, ids, is_id):
    words = tl.load(mask_ptr + ids // 32, is_id, other=0)
    return ((words >> (ids % 32)) & 1) != 0


@triton.jit
def mask_kernel(
    logits_ptr, logits_stride, request_of_row_ptr, row_starts_ptr, masks_ptr, masks_stride, mask_starts_ptr,
    vocab_size, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """-inf for what is not allowed in tile `program_id(1)` of row `program_id(0)`; nothing else is written."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    first = tl.load(mask_starts_ptr + request)
    if first < 0:
        return
    mask = first + row - tl.load(row_starts_ptr + request)
    ids = tl.program_id(1) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    is_id = ids < vocab_size
    is_banned = is_id & (_is_allowed(masks_ptr + mask.to(tl.int64) * masks_stride, ids, is_id) == 0)
    banned = tl.full([BLOCK_VOCAB], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row.to(tl.int64) * logits_stride + ids, banned, is_banned)


@triton.jit
def lift_kernel(
    changed_ptr, changed_stride, logits_ptr, logits_stride, request_of_row_ptr, row_starts_ptr,
    masks_ptr, masks_stride, mask_starts_ptr, slots_ptr, vocab_size, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Looks for a finite logit in row `program_id(0)`; finding none, writes what the mask allows of the own logits."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    first = tl.load(mask_starts_ptr + request)
    if (first < 0) | (tl.load(slots_ptr + request) < 0):
        return
    changed_row_ptr = changed_ptr + row.to(tl.int64) * changed_stride
    num_left = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK_VOCAB):
        ids = start + tl.arange(0, BLOCK_VOCAB)
        changed = tl.load(changed_row_ptr + ids, ids < vocab_size, other=float("-inf"))
        num_left += tl.sum((changed != float("-inf")).to(tl.int32), 0)
    if num_left > 0:
        return
    mask_ptr = masks_ptr + (first + row - tl.load(row_starts_ptr + request)).to(tl.int64) * masks_stride
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    for start in range(0, vocab_size, BLOCK_VOCAB):
        ids = start + tl.arange(0, BLOCK_VOCAB)
        is_id = ids < vocab_size
        is_allowed = is_id & _is_allowed(mask_ptr, ids, is_id)
        own = tl.load(row_ptr + ids, is_allowed, other=0.0).to(changed_ptr.dtype.element_ty)
        tl.store(changed_row_ptr + ids, own, is_allowed)


def mask_windows(
    logits: Tensor, request_of_row: Tensor, row_starts: Tensor, masks: Tensor, mask_starts: Tensor
) -> None:
    """Changes `logits` [M, V] in place. request_of_row [M] and row_starts [R] int32 as in `kernels.ragged_rows`; masks
    [N, ceil(V / 32)] int32, bits as in the package; mask_starts [R] int32: the mask of each request's first row, those
    of the next ones follow; -1 leaves the request alone."""
    num_rows, vocab_size = logits.shape
    mask_kernel[num_rows, triton.cdiv(vocab_size, _BLOCK_VOCAB)](
        logits, logits.stride(0), request_of_row, row_starts, masks, masks.stride(0), mask_starts,
        vocab_size, BLOCK_VOCAB=_BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip


def lift_controls(
    changed: Tensor,
    logits: Tensor,
    request_of_row: Tensor,
    row_starts: Tensor,
    masks: Tensor,
    mask_starts: Tensor,
    slots: Tensor,
) -> None:
    """Takes controls back where they left nothing that a mask allows: such rows of `changed` [M, V] float32, masked and
    controlled, become the masked `logits` [M, V] again. slots [R] int32: -1 for requests without controls; the rest as
    for `mask_windows`."""
    num_rows, vocab_size = logits.shape
    lift_kernel[(num_rows,)](
        changed, changed.stride(0), logits, logits.stride(0), request_of_row, row_starts,
        masks, masks.stride(0), mask_starts, slots, vocab_size, BLOCK_VOCAB=_BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip


def mask_logits(logits: npt.NDArray[np.float32], masks: npt.NDArray[np.uint32]) -> None:
    """Changes `logits` [n, V] in place (see the package)."""
    zero = torch.zeros(1, dtype=torch.int32)
    window = torch.zeros(len(logits), dtype=torch.int32), zero
    mask_windows(torch.from_numpy(logits), *window, torch.from_numpy(masks.view(np.int32)), zero)
