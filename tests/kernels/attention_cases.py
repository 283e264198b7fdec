"""Random pages and shapes for the attention tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Sizes of an attention layer and of its pages."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    window: int = 0
    has_norms: bool = False
    kv_dtype: torch.dtype = torch.float32

    @property
    def kv_width(self) -> int:
        """Elements of a row's K and V."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def width(self) -> int:
        """Elements of a row of qkv."""
        return self.num_heads * self.head_dim + self.kv_width


CASES = [
    Case(),
    Case(num_heads=4, num_kv_heads=2, head_dim=16, page_size=32, window=5, has_norms=True),
    Case(num_heads=8, num_kv_heads=1, head_dim=128, window=20, has_norms=True),
    Case(num_heads=5, num_kv_heads=5, head_dim=48, page_size=48),
    Case(num_heads=14, num_kv_heads=2, head_dim=80, window=1),
]
HALF_CASES = [case._replace(kv_dtype=torch.float16) for case in CASES]


class Store(NamedTuple):
    """Pages of a few slots in random order, with rotary tables and norms."""

    page_table: Tensor
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    def clone_pages(self) -> Store:
        """The same with pages of its own."""
        return self._replace(keys=self.keys.clone(), values=self.values.clone())

    @property
    def pages(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Arguments of the operations, page_table to values."""
        return self[:5]


def make_store(case: Case, num_slots: int = 3, max_len: int = 160, seed: int = 0) -> Store:
    """Pages that were never written hold NaN: reading one where it could count shows."""
    generator = torch.Generator().manual_seed(seed)
    max_pages = -(-max_len // case.page_size)
    num_pages = num_slots * max_pages + 2
    order = torch.randperm(num_pages, generator=generator)[: num_slots * max_pages]
    angles = torch.rand(max_len + 32, case.head_dim // 2, generator=generator) * 6
    shape = (num_pages, case.num_kv_heads)
    norms = [torch.rand(case.head_dim, generator=generator) + 0.5 if case.has_norms else None for _ in range(2)]
    return Store(
        order.view(num_slots, max_pages).int().contiguous(),
        angles.cos() * 1.1,
        angles.sin() * 1.1,
        torch.full((*shape, case.head_dim, case.page_size), torch.nan, dtype=case.kv_dtype),
        torch.full((*shape, case.page_size, case.head_dim), torch.nan, dtype=case.kv_dtype),
        norms[0],
        norms[1],
    )


def int32(*numbers: int) -> Tensor:
    """A tensor of positions or slots."""
    return torch.tensor(numbers, dtype=torch.int32)


def unwritten(num_rows: int, case: Case) -> Tensor:
    """An output in which an element that is not written fails."""
    return torch.full((num_rows, case.num_heads * case.head_dim), torch.nan)
