"""The target's forward: rows of any mix of prefill chunks, decode and verify windows through all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_pages import zero_pages
from kernels.registry import Ops
from service_kit.rope import rope_tables
from verifier_service.config import TargetConfig
from verifier_service.weights import TargetWeights

PAGE_SIZE = 16
"""Positions in a page; the attention kernels are built for it."""


class TokenRows(NamedTuple):
    """Tokens of one forward."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int32
    slots: Tensor  # [num_rows] int32, row of the page table


@dataclass(frozen=True)
class Workspace:
    """Memory of a session: K/V pages, rotary tables and the buffers of a forward, allocated once."""

    keys: tuple[Tensor, ...]  # per layer [num_pages, num_kv_heads, head_dim, PAGE_SIZE] float32
    values: tuple[Tensor, ...]  # per layer [num_pages, num_kv_heads, PAGE_SIZE, head_dim] float32
    cos: Tensor  # [max_model_len, head_dim / 2]
    sin: Tensor  # [max_model_len, head_dim / 2]
    normed: Tensor  # [max_batch_tokens, hidden]
    attended: Tensor  # [max_batch_tokens, num_heads · head_dim]
    activated: Tensor  # [max_batch_tokens, intermediate]
    feature_layer_ids: tuple[int, ...]
    features: Tensor  # [max_batch_tokens, layers · hidden]; outputs of the feature layers, in their order


def page_bytes(config: TargetConfig) -> int:
    """Bytes of one K/V page, all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * PAGE_SIZE * 4


class TargetModel:
    """Weights and operations; all state is in the caller's Workspace."""

    def __init__(self, config: TargetConfig, weights: TargetWeights, ops: Ops) -> None:
        self.config, self.weights, self._ops = config, weights, ops

    def workspace(
        self, num_pages: int, max_model_len: int, max_batch_tokens: int, feature_layer_ids: Sequence[int] = ()
    ) -> Workspace:
        """Allocates a session's memory; page contents start as zeros, which the system commits when first written.

        Raises MemoryError (or torch's RuntimeError) if there is not enough.
        """
        config = self.config
        heads, head_dim = config.num_kv_heads, config.head_dim
        rope = rope_tables(config.rope_source, max_model_len)
        return Workspace(
            keys=tuple(zero_pages(num_pages, heads, head_dim, PAGE_SIZE) for _ in range(config.num_layers)),
            values=tuple(zero_pages(num_pages, heads, PAGE_SIZE, head_dim) for _ in range(config.num_layers)),
            cos=rope.cos,
            sin=rope.sin,
            normed=torch.empty(max_batch_tokens, config.hidden_size),
            attended=torch.empty(max_batch_tokens, config.num_heads * head_dim),
            activated=torch.empty(max_batch_tokens, config.intermediate_size),
            feature_layer_ids=tuple(feature_layer_ids),
            features=torch.empty(max_batch_tokens, len(feature_layer_ids) * config.hidden_size),
        )

    def forward(self, rows: TokenRows, page_table: Tensor, space: Workspace) -> Tensor:
        """Computes every row, writing its K/V to its page and its features to `space.features`.

        `page_table` is int32 [num_slots, max_pages]. Returns the residual stream after the final norm,
        [num_rows, hidden], valid until the next call; row i's features are `space.features[i]`.
        """
        config, weights, ops, eps = self.config, self.weights, self._ops, self.config.rms_norm_eps
        num_rows, hidden = len(rows.token_ids), config.hidden_size
        normed, attended, activated = (buffer[:num_rows] for buffer in (space.normed, space.attended, space.activated))
        residual = weights.embedding[rows.token_ids]
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        ops.rms_norm(residual, weights.layers[0].input_norm, eps, normed)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            ops.paged_attention(
                layer.qkv(normed),
                rows.positions,
                rows.slots,
                page_table,
                space.cos,
                space.sin,
                space.keys[index],
                space.values[index],
                layer.q_norm,
                layer.k_norm,
                eps,
                config.windows[index],
                attended,
            )
            ops.add_rms_norm(residual, layer.output(attended), layer.post_attention_norm, eps, normed)
            ops.silu_mul(layer.gate_up(normed), activated)
            ops.add_rms_norm(residual, layer.down(activated), next_norm, eps, normed)
            for place, layer_id in enumerate(space.feature_layer_ids):
                if layer_id == index:
                    space.features[:num_rows, place * hidden : (place + 1) * hidden] = residual
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, vocab] of rows of `forward`'s result."""
        return self.weights.lm_head(hidden)
