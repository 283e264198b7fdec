"""The forward of a DSpark drafter (paper, section 3): context features to K/V pages, and draft blocks over them.

The context of a block is the target's features of every position before its anchor, projected once and turned into each
layer's own K and V. A block is [anchor, mask, mask ...]; slot j's hidden state predicts position anchor + 1 + j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_service.config import DrafterConfig
from drafter_service.records import IntArray
from drafter_service.weights import DrafterWeights
from kernels.kv_pages import zero_pages
from kernels.markov_sample import BlockDraft
from kernels.registry import Ops
from kernels.sampling import SlotSampling
from service_kit.rope import rope_tables

PAGE_SIZE = 16
_INGEST_ROWS = 512
"""Context rows computed at once: bounds the memory of a long prompt's ingest."""


class DraftCache:
    """Draft K/V pages of a session and the rotary tables that reach as far as its contexts."""

    def __init__(self, config: DrafterConfig, num_pages: int, num_positions: int) -> None:
        """Zeroed pages (memory is taken as they are used) for contexts of up to `num_positions`."""
        pages = (config.num_layers, num_pages, config.num_kv_heads)
        self.keys = zero_pages(*pages, config.head_dim, PAGE_SIZE)  # [layers, pages, Hkv, D, page_size]
        self.values = zero_pages(*pages, PAGE_SIZE, config.head_dim)  # [layers, pages, Hkv, page_size, D]
        self.rope = rope_tables(config.decoder, num_positions + config.block_size)


class BlockForward(NamedTuple):
    """What the parallel backbone gives the sequential head."""

    hidden: Tensor  # [B, n, H], after the final norm
    base_logits: Tensor  # [B, n, Vd]


def page_bytes(config: DrafterConfig) -> int:
    """Bytes of one K/V page, all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * PAGE_SIZE * 4


class DrafterModel:
    """Weights and scratch rows. One thread at a time."""

    def __init__(
        self, config: DrafterConfig, weights: DrafterWeights, ops: Ops, sample_block: Callable[..., BlockDraft]
    ) -> None:
        """`ops` run between the linear layers, `sample_block` is `kernels.markov_sample`'s sequential head."""
        self.config, self.weights, self._ops, self._sample_block = config, weights, ops, sample_block
        self._mask_row = weights.embedding[config.mask_token_id].float()
        self._scratch: dict[str, Tensor] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V of all layers."""
        return page_bytes(self.config)

    def ingest(
        self, features: Tensor, positions: Tensor, row_slots: Tensor, page_table: Tensor, cache: DraftCache
    ) -> None:
        """Writes the K/V of context rows to their pages.

        Args:
            features: float32 [M, feature_size], the target's hidden states of the feature layers side by side.
            positions: int32 [M].
            row_slots: int32 [M], rows of `page_table`.
            page_table: int32 [num_slots, max_pages].
            cache: pages to write.
        """
        config, weights = self.config, self.weights
        kv_size = 2 * config.num_kv_heads * config.head_dim
        for start in range(0, len(features), _INGEST_ROWS):
            rows = slice(start, start + _INGEST_ROWS)
            context = weights.context_fc(features[rows])
            self._ops.rms_norm(context, weights.context_norm, config.norm_eps, context)
            kv = weights.context_kv(context)
            for i, layer in enumerate(weights.layers):
                self._ops.write_context(
                    kv[:, i * kv_size : (i + 1) * kv_size].contiguous(),
                    positions[rows],
                    row_slots[rows],
                    page_table,
                    *cache.rope,
                    cache.keys[i],
                    cache.values[i],
                    layer.k_norm,
                    config.norm_eps,
                )

    def forward_block(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        row_slots: Tensor,
        num_drafts: int,
        page_table: Tensor,
        cache: DraftCache,
    ) -> BlockForward:
        """One pass of the parallel backbone over B blocks.

        Args:
            anchor_ids: int64 [B], last committed tokens.
            anchor_positions: int32 [B]; the context is every position before.
            row_slots: int32 [B], rows of `page_table`.
            num_drafts: n, 1 ... block_size; the block computed is the shortest trained one that holds them.
            page_table: int32 [num_slots, max_pages].
            cache: pages to read.
        """
        config, weights, ops = self.config, self.weights, self._ops
        num_rows, block_len, eps = len(anchor_ids), config.block_len_for(num_drafts), config.norm_eps
        residual = self._rows("residual", num_rows * block_len, config.hidden_size)
        blocks = residual.view(num_rows, block_len, config.hidden_size)
        blocks[:] = self._mask_row
        blocks[:, 0] = weights.embedding[anchor_ids]
        normed = self._rows("normed", num_rows * block_len, config.hidden_size)
        attended = self._rows("attended", num_rows * block_len, config.num_heads * config.head_dim)
        activated = self._rows("activated", num_rows * block_len, config.intermediate_size)
        ops.rms_norm(residual, weights.layers[0].input_norm, eps, normed)
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            ops.block_attention(
                layer.qkv(normed),
                anchor_positions,
                row_slots,
                block_len,
                page_table,
                *cache.rope,
                cache.keys[i],
                cache.values[i],
                layer.q_norm,
                layer.k_norm,
                eps,
                layer.window,
                attended,
            )
            ops.add_rms_norm(residual, layer.o(attended), layer.post_attention_norm, eps, normed)
            ops.silu_mul(layer.gate_up(normed), activated)
            ops.add_rms_norm(residual, layer.down(activated), next_norm, eps, normed)
        hidden = normed.view(num_rows, block_len, -1)[:, :num_drafts].contiguous()
        logits = weights.lm_head(hidden.flatten(0, 1))
        return BlockForward(hidden, logits.view(num_rows, num_drafts, -1))

    def sample(
        self,
        forward: BlockForward,
        anchor_ids: IntArray,
        sampling: Sequence[SlotSampling],
        anchor_positions: IntArray,
        rounds: IntArray,
        draft_probs_out: Sequence[npt.NDArray[np.float32] | None],
    ) -> BlockDraft:
        """Runs the sequential head over B blocks, [B] each; draft_probs_out as `kernels.markov_sample` says."""
        weights = self.weights
        return self._sample_block(
            forward.base_logits.numpy(),
            forward.hidden.numpy(),
            weights.markov,
            weights.confidence,
            anchor_ids.astype(np.uint32),
            sampling,
            anchor_positions,
            rounds,
            weights.draft_to_target,
            draft_probs_out,
        )

    def _rows(self, name: str, num_rows: int, width: int) -> Tensor:
        """Scratch [num_rows, width] that is made once for the largest call so far."""
        held = self._scratch.get(name)
        if held is None or len(held) < num_rows:
            held = self._scratch[name] = torch.empty(num_rows, width)
        return held[:num_rows]
