"""Attention of DSpark draft blocks in plain torch (pages as in `paged_attention/reference.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention.reference import gather_context, masked_attention, normalise_and_rotate


def block_attention(
    qkv: Tensor,
    anchor_positions: Tensor,
    row_slots: Tensor,
    block_len: int,
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
    """Attends each slot of a block to the context before its anchor and to every slot of its block.

    Slot j of block b sits at position anchor_positions[b] + j. The block's own K/V never reach the pages.

    Args:
        qkv: [B·G, (Hq + 2·Hkv)·D], blocks one after another; left unchanged.
        anchor_positions: int32 [B]; the context is every position before the anchor.
        row_slots: int32 [B], the row of `page_table` of each block.
        block_len: G, slots of a block.
        page_table: int32 [num_slots, max_pages].
        cos: [max_len, D/2], as `sin`.
        sin: [max_len, D/2].
        keys: [num_pages, Hkv, D, page_size], only read.
        values: [num_pages, Hkv, page_size, D], only read.
        q_norm: [D] or None, weight of the RMSNorm of each query head, before RoPE.
        k_norm: [D] or None, the same for key heads.
        eps: of those norms.
        window: positions i and j see each other iff |i - j| < window (context and block alike); 0 for no window.
        out: [B·G, Hq·D].
    """
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    heads = qkv.view(len(qkv), -1, head_dim)
    offsets = torch.arange(block_len, device=qkv.device)
    positions = (anchor_positions[:, None] + offsets).flatten()
    queries = normalise_and_rotate(heads[:, : -2 * num_kv_heads], positions, cos, sin, q_norm, eps)
    block_keys = normalise_and_rotate(heads[:, -2 * num_kv_heads : -num_kv_heads], positions, cos, sin, k_norm, eps)
    block_values = heads[:, -num_kv_heads:]
    for block, (anchor, slot) in enumerate(zip(anchor_positions.tolist(), row_slots.tolist(), strict=True)):
        rows = slice(block * block_len, (block + 1) * block_len)
        context_keys, context_values = gather_context(page_table[slot], anchor, keys, values)
        seen_keys = torch.cat((context_keys, block_keys[rows].transpose(0, 1)), dim=1)
        seen_values = torch.cat((context_values, block_values[rows].transpose(0, 1)), dim=1)
        distance = (anchor + offsets[:, None]) - torch.arange(anchor + block_len, device=qkv.device)
        visible = distance.abs() < window if window else torch.ones_like(distance, dtype=torch.bool)
        out[rows] = masked_attention(queries[rows], seen_keys, seen_values, visible)
