"""Shapes of the attention kernels' work, from sizes that do not depend on a step's data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.triton.attention import SEGMENT, merge_parts_kernel

_MAX_SPLIT_ROWS = 64
"""Rows up to which programs share a context: more rows are enough work for a GPU, and states take memory by row."""
_MAX_PARTS = 16
"""Programs that share a context. Segments are dealt out in turn."""
BLOCK_N = 32
"""Positions of a block of K and V: with 64 the attention kernels spill registers at head_dim 128."""
_LANES = 16
"""Positions of a page that are one vector (32 bytes of bfloat16)."""


class Heads(NamedTuple):
    """Of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads of a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def group_block(self) -> int:
        """Queries of a row in a tile."""
        return int(triton.next_power_of_2(self.group))

    @property
    def blocks(self) -> dict[str, int]:
        """Sizes that kernels are compiled for. A tensor core takes 16 or more of each."""
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_HALF": max(16, triton.next_power_of_2(self.head_dim // 2)),
            "BLOCK_HEAD": max(16, triton.next_power_of_2(self.head_dim)),
        }

    def num_stages(self, element_bytes: int) -> int:
        """Blocks of K and V in shared memory at once."""
        return 3 if element_bytes <= 2 else 1


def heads_of(width: int, page_table: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> Heads:
    """Checks the layout of pages and tables; `width` is that of all query heads.

    Raises ValueError naming what the kernels cannot address.
    """
    num_pages, num_kv_heads, head_dim, page_size = keys.shape
    if values.shape != (num_pages, num_kv_heads, page_size, head_dim):
        raise ValueError(f"values are {list(values.shape)} beside keys {list(keys.shape)}")
    if page_size % _LANES or head_dim % 2:
        raise ValueError(f"page_size {page_size} must be a multiple of {_LANES}, head_dim {head_dim} of 2")
    if not (cos.shape == sin.shape and cos.shape[-1] == head_dim // 2):
        raise ValueError(f"rotary tables are {list(cos.shape)} and {list(sin.shape)} for head_dim {head_dim}")
    for name, tensor in (("page_table", page_table), ("cos", cos), ("sin", sin), ("keys", keys), ("values", values)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    check_ints(page_table=page_table)
    return Heads(width // head_dim, num_kv_heads, head_dim, page_size)


def check_ints(**tensors: Tensor) -> None:
    """Raises ValueError for a tensor that is not contiguous int32."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous torch.int32, not {tensor.dtype}")


class Parts(NamedTuple):
    """Memory for the states of segments when programs share a context."""

    totals: Tensor | None  # float32 [num_rows, num_heads, max_segments, head_dim]; None if none is shared
    stats: Tensor | None  # float32 [num_rows, num_heads, max_segments, 2]: largest score, weight
    max_segments: int
    num_parts: int


def max_segments(page_table: Tensor, page_size: int) -> int:
    """Segments of the longest context that a page table holds, and one for a block."""
    return -(-page_table.shape[1] * page_size // int(SEGMENT)) + 1


def is_shared(num_rows: int, num_segments: int) -> bool:
    """Whether programs share contexts, given `max_segments`: rows are few and a context may be longer than one."""
    return num_rows <= _MAX_SPLIT_ROWS and num_segments > 2


def parts_bytes(num_rows: int, num_heads: int, head_dim: int, max_len: int) -> int:
    """Memory that a call over so many rows takes for states: what a memory plan must leave free."""
    num_segments = -(-max_len // int(SEGMENT)) + 1
    return num_rows * num_heads * num_segments * (head_dim + 2) * 4 if is_shared(num_rows, num_segments) else 0


def largest_parts_bytes(row_counts: Iterable[int], num_heads: int, head_dim: int, max_len: int) -> int:
    """The most that calls over any of these numbers of rows take."""
    return max(parts_bytes(num_rows, num_heads, head_dim, max_len) for num_rows in row_counts)


def make_parts(num_rows: int, heads: Heads, page_table: Tensor) -> Parts:
    """How a call's contexts are shared."""
    count = max_segments(page_table, heads.page_size)
    if not is_shared(num_rows, count):
        return Parts(None, None, count, 1)
    shape = num_rows, heads.num_heads, count
    totals = torch.empty(*shape, heads.head_dim, dtype=torch.float32, device=page_table.device)
    stats = torch.empty(*shape, 2, dtype=torch.float32, device=page_table.device)
    return Parts(totals, stats, count, min(count, _MAX_PARTS))


def merge_parts(
    parts: Parts, heads: Heads, positions: Tensor, row_slots: Tensor, window: int, out: Tensor, block_len: int = 0
) -> None:
    """Writes `out` from the states of a call whose contexts were shared."""
    if parts.totals is not None:
        merge_parts_kernel[(len(out), heads.num_heads)](
            parts.totals,
            parts.stats,
            positions,
            row_slots,
            out,
            out.stride(0),
            window,
            parts.max_segments,
            BLOCK_LEN=block_len,
            HEAD_DIM=heads.head_dim,
            BLOCK_HEAD=heads.blocks["BLOCK_HEAD"],
            num_warps=1,
            enable_fp_fusion=False,
        )
