"""One pass over the logits; each program reads the words of its tile's tokens. Equal to the reference bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_VOCAB = 4096


@triton.jit
def mask_kernel(
    logits_ptr, logits_stride, masks_ptr, masks_stride, mask_of_row_ptr, vocab_size, BLOCK_VOCAB: tl.constexpr
):  # fmt: skip
    """-inf for what is not allowed in tile `program_id(1)` of row `program_id(0)`; nothing else is written."""
    row = tl.program_id(0)
    mask = tl.load(mask_of_row_ptr + row)
    if mask < 0:
        return
    ids = tl.program_id(1) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    is_id = ids < vocab_size
    words = tl.load(masks_ptr + mask.to(tl.int64) * masks_stride + ids // 32, is_id, other=-1)
    is_banned = is_id & (((words >> (ids % 32)) & 1) == 0)
    banned = tl.full([BLOCK_VOCAB], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row.to(tl.int64) * logits_stride + ids, banned, is_banned)


def mask_rows(logits: Tensor, masks: Tensor, mask_of_row: Tensor) -> None:
    """Changes `logits` [M, V] in place. masks [N, ceil(V / 32)] int32, bits as in the package; mask_of_row [M] int32
    names each row's mask, -1 leaves the row alone."""
    num_rows, vocab_size = logits.shape
    mask_kernel[num_rows, triton.cdiv(vocab_size, _BLOCK_VOCAB)](
        logits, logits.stride(0), masks, masks.stride(0), mask_of_row, vocab_size,
        BLOCK_VOCAB=_BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip


def mask_logits(logits: npt.NDArray[np.float32], masks: npt.NDArray[np.uint32]) -> None:
    """Changes `logits` [n, V] in place (see the package)."""
    rows = torch.arange(len(logits), dtype=torch.int32)
    mask_rows(torch.from_numpy(logits), torch.from_numpy(masks.view(np.int32)), rows)
