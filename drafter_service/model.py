"""The forward of a DSpark drafter (paper, section 3): context features to K/V pages, and draft blocks over them.

The context of a block is the target's features of every position before its anchor, projected once and turned into each
layer's own K and V. A block is [anchor, mask, mask ...]; slot j's hidden state predicts position anchor + 1 + j.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_service.config import DrafterConfig
from drafter_service.records import IntArray
from drafter_service.weights import DrafterWeights
from kernels.cpu.native import num_threads
from kernels.cpu.program import Program, recording
from kernels.kv_pages import zero_pages
from kernels.markov_sample import BlockDraft
from kernels.registry import Ops
from kernels.sampling import SlotSampling
from service_kit.rope import rope_tables

PAGE_SIZE = 16
INGEST_ROWS = 512
"""Context rows computed at once: bounds the memory of a long prompt's ingest."""
_MAX_RECORDED_ROWS = 128
"""Rows from which on the time between the kernels of a call does not count."""


class DraftCache:
    """Draft K/V pages of a session and the rotary tables that reach as far as its contexts."""

    def __init__(
        self, config: DrafterConfig, num_pages: int, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Zeroed pages (memory is taken as they are used) for contexts of up to `num_positions`."""
        make = functools.partial(zero_pages, dtype=dtype, device=device)
        pages = (config.num_layers, num_pages, config.num_kv_heads)
        self.keys = make(*pages, config.head_dim, PAGE_SIZE)  # [layers, pages, Hkv, D, page_size]
        self.values = make(*pages, PAGE_SIZE, config.head_dim)  # [layers, pages, Hkv, page_size, D]
        rope = rope_tables(config.decoder, num_positions + config.block_size)
        self.rope = rope.cos.to(device), rope.sin.to(device)
        self.programs: dict[tuple[str | int, ...], Program] = {}
        """Recorded calls over these pages."""


class BlockForward(NamedTuple):
    """What the parallel backbone gives the sequential head."""

    hidden: Tensor  # [B, n, H], after the final norm
    base_logits: Tensor  # [B, n, Vd]


def page_bytes(config: DrafterConfig, dtype: torch.dtype) -> int:
    """Bytes of one K/V page, all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * PAGE_SIZE * dtype.itemsize


class _Buffers:
    """Rows that a call computes, made once."""

    def __init__(self, config: DrafterConfig, num_rows: int, like: Tensor) -> None:
        kv_size = 2 * config.num_kv_heads * config.head_dim
        attended = config.num_heads * config.head_dim

        def rows(width: int) -> Tensor:
            return like.new_empty(num_rows, width)

        self.num_rows = num_rows
        self.positions, self.slots = (like.new_empty(num_rows, dtype=torch.int32) for _ in range(2))
        self.residual, self.normed, self.delta = (rows(config.hidden_size) for _ in range(3))
        self.qkv, self.attended = rows(attended + kv_size), rows(attended)
        self.gate_up, self.activated = rows(2 * config.intermediate_size), rows(config.intermediate_size)
        self.features, self.kv = rows(config.feature_size), rows(kv_size)
        self.logits = rows(config.draft_vocab_size)


class DrafterModel:
    """Weights and scratch rows. One thread at a time."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: DrafterWeights,
        ops: Ops,
        sample_block: Callable[..., BlockDraft],
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`ops` run between the linear layers, `sample_block` is `kernels.markov_sample`'s sequential head.

        K/V pages are `kv_dtype`, by default as wide as the rows (`kernels.kv_pages`).
        """
        self.config, self.weights, self._ops, self._sample_block = config, weights, ops, sample_block
        self.kv_dtype = kv_dtype or self.like.dtype
        self._mask_row = weights.embedding[config.mask_token_id].to(self.like.dtype)
        self._small, self._large = _Buffers(config, _MAX_RECORDED_ROWS, self.like), _Buffers(config, 0, self.like)

    @property
    def like(self) -> Tensor:
        """A tensor of the device and type that rows have."""
        return self.weights.final_norm

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V of all layers."""
        return page_bytes(self.config, self.kv_dtype)

    def make_cache(self, num_pages: int, num_positions: int) -> DraftCache:
        """Pages for contexts of up to `num_positions`, where the weights are."""
        return DraftCache(self.config, num_pages, num_positions, self.kv_dtype, self.like.device)

    def reserve(self, num_rows: int) -> None:
        """Makes room for calls of so many rows: memory that captured calls use stays where it is."""
        self._buffers(num_rows)

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
        for start in range(0, len(features), INGEST_ROWS):
            rows = slice(start, start + INGEST_ROWS)
            num_rows = len(features[rows])
            buffers = self._buffers(num_rows)
            buffers.features[:num_rows] = features[rows]
            buffers.positions[:num_rows], buffers.slots[:num_rows] = positions[rows], row_slots[rows]
            run = functools.partial(self._ingest_rows, buffers, num_rows, page_table, cache)
            self._run(("ingest", num_rows), page_table, buffers, cache, run)

    def _ingest_rows(self, buffers: _Buffers, num_rows: int, page_table: Tensor, cache: DraftCache) -> None:
        weights, eps = self.weights, self.config.norm_eps
        context, kv = buffers.normed[:num_rows], buffers.kv[:num_rows]
        weights.context_fc(buffers.features[:num_rows], context)
        self._ops.rms_norm(context, weights.context_norm, eps, context)
        for i, layer in enumerate(weights.layers):
            self._ops.write_context(
                layer.context_kv(context, kv),
                buffers.positions[:num_rows],
                buffers.slots[:num_rows],
                page_table,
                *cache.rope,
                cache.keys[i],
                cache.values[i],
                layer.k_norm,
                eps,
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
        """One pass of the parallel backbone over B blocks; its result is valid until the next call.

        Args:
            anchor_ids: int64 [B], last committed tokens.
            anchor_positions: int32 [B]; the context is every position before.
            row_slots: int32 [B], rows of `page_table`.
            num_drafts: n, 1 ... block_size; the block computed is the shortest trained one that holds them.
            page_table: int32 [num_slots, max_pages].
            cache: pages to read.
        """
        config = self.config
        num_blocks, block_len = len(anchor_ids), config.block_len_for(num_drafts)
        num_rows = num_blocks * block_len
        buffers = self._buffers(num_rows)
        blocks = buffers.residual[:num_rows].view(num_blocks, block_len, config.hidden_size)
        blocks[:] = self._mask_row
        blocks[:, 0] = self.weights.embedding[anchor_ids]
        buffers.positions[:num_blocks], buffers.slots[:num_blocks] = anchor_positions, row_slots
        run = functools.partial(self._run_layers, buffers, num_blocks, block_len, page_table, cache)
        self._run(("block", num_blocks, block_len), page_table, buffers, cache, run)
        hidden = buffers.normed[:num_rows].view(num_blocks, block_len, -1)[:, :num_drafts].contiguous()
        logits = self.weights.lm_head(hidden.flatten(0, 1), buffers.logits[: num_blocks * num_drafts])
        return BlockForward(hidden, logits.view(num_blocks, num_drafts, -1))

    def _run_layers(
        self, buffers: _Buffers, num_blocks: int, block_len: int, page_table: Tensor, cache: DraftCache
    ) -> None:
        weights, ops, eps = self.weights, self._ops, self.config.norm_eps
        parts = buffers.residual, buffers.normed, buffers.qkv, buffers.attended, buffers.delta
        residual, normed, qkv, attended, delta = (part[: num_blocks * block_len] for part in parts)
        gate_up, activated = (part[: num_blocks * block_len] for part in (buffers.gate_up, buffers.activated))
        ops.rms_norm(residual, weights.layers[0].input_norm, eps, normed)
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            ops.block_attention(
                layer.qkv(normed, qkv),
                buffers.positions[:num_blocks],
                buffers.slots[:num_blocks],
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
            ops.add_rms_norm(residual, layer.o(attended, delta), layer.post_attention_norm, eps, normed)
            ops.silu_mul(layer.gate_up(normed, gate_up), activated)
            ops.add_rms_norm(residual, layer.down(activated, delta), next_norm, eps, normed)

    def _buffers(self, num_rows: int) -> _Buffers:
        """Room for so many rows: what calls that may be recorded share, else what the largest call so far needed."""
        if num_rows <= self._small.num_rows:
            return self._small
        if num_rows > self._large.num_rows:
            self._large = _Buffers(self.config, num_rows, self.like)
        return self._large

    def _run(
        self,
        call: tuple[str | int, ...],
        page_table: Tensor,
        buffers: _Buffers,
        cache: DraftCache,
        run: Callable[[], None],
    ) -> None:
        """Runs kernels; small calls as they were recorded when first made, without Python between them."""
        if buffers is not self._small or not self._ops.is_compiled:
            run()
            return
        key = *call, page_table.data_ptr(), *page_table.shape, num_threads()
        if key not in cache.programs:
            with recording() as made:
                run()
            cache.programs[key] = Program(made)
        cache.programs[key].run()

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
