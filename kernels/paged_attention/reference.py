"""Paged attention in plain torch: the truth that every other implementation is tested against.

Pages: keys [num_pages, Hkv, D, page_size] (transposed inside a page), values [num_pages, Hkv, page_size, D].
Pages are as wide as rows, or float16: K and V are then rounded as they are written (ties to even; beyond ±65504 they
become that, never infinite) and read as float32.
Position p of a slot is entry p % page_size of page `page_table[slot, p // page_size]`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST_HALF = torch.finfo(torch.float16).max


def normalise_and_rotate(
    heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float
) -> Tensor:
    """Optional RMSNorm of each head, then RoPE in the rotate-half layout; heads [M, H, D], cos, sin [max_len, D/2]."""
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * norm
    row_cos, row_sin = cos[positions.long(), None], sin[positions.long(), None]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * row_cos - second * row_sin, second * row_cos + first * row_sin), dim=-1)


def write_context(
    kv: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Writes the K (normalised, rotated) and V of kv [M, 2·Hkv·D] to the pages of their positions."""
    num_rows, (num_pages, num_kv_heads, head_dim, page_size) = len(kv), keys.shape
    raw_keys, raw_values = kv.view(num_rows, 2, num_kv_heads, head_dim).unbind(1)
    pages = page_table[row_slots.long(), positions.long() // page_size].long()
    assert num_rows == 0 or 0 <= int(pages.min()) <= int(pages.max()) < num_pages, "a row's position has no page"
    entries = positions.long() % page_size
    keys[pages, :, :, entries] = _as_pages(normalise_and_rotate(raw_keys, positions, cos, sin, k_norm, eps), keys)
    values[pages, :, entries] = _as_pages(raw_values, values)


def _as_pages(rows: Tensor, pages: Tensor) -> Tensor:
    if pages.dtype is torch.float16:
        rows = rows.clamp(-_LARGEST_HALF, _LARGEST_HALF)
    return rows.to(pages.dtype)


def gather_context(pages: Tensor, length: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K and V, each [Hkv, length, D], of the first `length` positions of a slot; pages: its row of the page table.

    Those of float16 pages are widened to float32.
    """
    used = pages[: -(-length // keys.shape[-1])].long()
    context_keys = keys[used].permute(1, 0, 3, 2).flatten(1, 2)
    context_values = values[used].transpose(0, 1).flatten(1, 2)
    if keys.dtype is torch.float16:
        context_keys, context_values = context_keys.float(), context_values.float()
    return context_keys[:, :length], context_values[:, :length]


def masked_attention(queries: Tensor, keys: Tensor, values: Tensor, is_visible: Tensor) -> Tensor:
    """softmax(q·k / sqrt(D)) v; queries [n, Hq, D], keys and values [Hkv, L, D], is_visible [n, L]; [n, Hq·D]."""
    num_rows, num_heads, head_dim = queries.shape
    grouped = queries.view(num_rows, len(keys), num_heads // len(keys), head_dim)
    scores = torch.einsum("nhgd,hld->nhgl", grouped, keys) / math.sqrt(head_dim)
    weights = scores.masked_fill(~is_visible[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("nhgl,hld->nhgd", weights, values).reshape(num_rows, -1)


def paged_attention(
    qkv: Tensor,
    positions: Tensor,
    row_slots: Tensor,
    page_table: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    window: int,
    out: Tensor,
) -> None:
    """Writes every row's K/V to its page, then attends every row to all positions of its slot up to its own.

    A call may mix decode rows, verify windows and prefill chunks; rows see the K/V of rows of the same call.

    Args:
        qkv: [M, (Hq + 2·Hkv)·D]; queries, then keys, then values. Left unchanged.
        positions: int32 [M]; no (slot, position) twice.
        row_slots: int32 [M], the row of `page_table` of each row.
        page_table: int32 [num_slots, max_pages].
        cos: [max_len, D/2], as `sin`; both may carry an attention scaling factor.
        sin: [max_len, D/2].
        keys: [num_pages, Hkv, D, page_size], updated.
        values: [num_pages, Hkv, page_size, D], updated.
        q_norm: [D] or None, weight of the RMSNorm of each query head, before RoPE.
        k_norm: [D] or None, the same for key heads.
        eps: of those norms.
        window: query i sees key j iff j <= i and i - j < window; 0 for no window.
        out: [M, Hq·D].
    """
    num_rows, num_kv_heads, head_dim = len(qkv), keys.shape[1], keys.shape[2]
    kv_size = num_kv_heads * head_dim
    write_context(
        qkv[:, -2 * kv_size :].contiguous(), positions, row_slots, page_table, cos, sin, keys, values, k_norm, eps
    )
    raw_queries = qkv[:, : -2 * kv_size].reshape(num_rows, -1, head_dim)
    queries = normalise_and_rotate(raw_queries, positions, cos, sin, q_norm, eps)
    for slot in set(row_slots.tolist()):
        rows = (row_slots == slot).nonzero().flatten()
        own = positions[rows, None].long()
        length = int(own.max()) + 1
        visible = (distance := own - torch.arange(length, device=qkv.device)) >= 0
        if window:
            visible &= distance < window
        context = gather_context(page_table[slot], length, keys, values)
        out[rows] = masked_attention(queries[rows], *context, visible)
