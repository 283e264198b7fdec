"""K/V pages and rotary heads as the compiled attention kernels see them (layout: `paged_attention/reference.py`)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.cpu.jit import compiled, types
from kernels.cpu.native import floats, halves, ints
from kernels.cpu.norm import inverse_rms
from kernels.cpu.simd import LANES, load_int, load_part, splat, store_part

_LOG2_E = math.log2(math.e)


class Pages(NamedTuple):
    """Addresses and sizes of a page table, the pages and the rotary tables."""

    page_table: int
    max_pages: int
    cos: int
    sin: int
    keys: int
    values: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    is_half: int  # 1 for pages of float16, 0 for float32


def pages_of(page_table: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> Pages:
    """Raises ValueError for sizes that the kernels cannot walk in whole lanes, and pages of mixed or other types."""
    _, num_kv_heads, head_dim, page_size = keys.shape
    if head_dim % LANES or page_size % LANES:
        raise ValueError(f"head_dim {head_dim} and page_size {page_size} must be multiples of {LANES}")
    is_half = keys.dtype is torch.float16
    of_pages = halves if is_half else floats
    return Pages(
        ints(page_table),
        page_table.shape[1],
        floats(cos),
        floats(sin),
        of_pages(keys),
        of_pages(values),
        num_kv_heads,
        head_dim,
        page_size,
        int(is_half),
    )


@compiled
def locate(pages: Pages, slot: int, position: int, kv_head: int) -> tuple[int, int]:
    """Element offsets of the first K and the first V element of a position, in the pages' type."""
    index = slot * pages.max_pages + position // pages.page_size
    page = types.int64(load_int(pages.page_table, index))
    start = (page * pages.num_kv_heads + kv_head) * pages.head_dim * pages.page_size
    entry = position % pages.page_size
    return start + entry, start + entry * pages.head_dim


@compiled
def query_factor(head_dim: int) -> Any:
    """Scale of a query whose scores are exponents of 2."""
    return types.float32(_LOG2_E / math.sqrt(head_dim))


@compiled
def rotate_head(
    source: int,
    start: int,
    position: int,
    pages: Pages,
    norm: int,
    eps: float,
    factor: float,
    out: int,
    out_start: int,
) -> None:
    """RMSNorm (unless `norm` is 0), RoPE in the rotate-half layout, times `factor`; one head to contiguous `out`."""
    half = pages.head_dim // 2
    scale = splat(inverse_rms(source, start, pages.head_dim, eps)) if norm != 0 else splat(1.0)
    for offset in range(0, half, LANES):
        count = half - offset
        first: Any = load_part(source, start + offset, count) * scale
        second: Any = load_part(source, start + half + offset, count) * scale
        if norm != 0:
            first = first * load_part(norm, offset, count)
            second = second * load_part(norm, half + offset, count)
        row_cos = load_part(pages.cos, position * half + offset, count) * splat(factor)
        row_sin = load_part(pages.sin, position * half + offset, count) * splat(factor)
        store_part(out, out_start + offset, count, first * row_cos - second * row_sin)
        store_part(out, out_start + half + offset, count, second * row_cos + first * row_sin)
