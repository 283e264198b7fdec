"""The target's forward: rows of any mix of prefill chunks, decode and verify windows through all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.native import num_threads
from kernels.cpu.program import Program, recording
from kernels.kv_pages import zero_pages
from kernels.registry import Ops
from service_kit.rope import rope_tables
from verifier_service.config import TargetConfig
from verifier_service.weights import TargetWeights

PAGE_SIZE = 16
"""Positions in a page; the attention kernels are built for it."""
_MAX_RECORDED_ROWS = 64
"""Rows from which on the time between the kernels of a forward does not count."""


class TokenRows(NamedTuple):
    """Tokens of one forward."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int32
    slots: Tensor  # [num_rows] int32, row of the page table


@dataclass(frozen=True)
class Workspace:
    """Memory of a session: K/V pages, rotary tables and the buffers of a forward, allocated once."""

    keys: tuple[Tensor, ...]  # per layer [num_pages, num_kv_heads, head_dim, PAGE_SIZE]
    values: tuple[Tensor, ...]  # per layer [num_pages, num_kv_heads, PAGE_SIZE, head_dim]
    cos: Tensor  # [max_model_len, head_dim / 2]
    sin: Tensor  # [max_model_len, head_dim / 2]
    positions: Tensor  # [max_batch_tokens] int32, as `slots` the copy that recorded forwards read
    slots: Tensor  # [max_batch_tokens] int32
    residual: Tensor  # [max_batch_tokens, hidden]
    normed: Tensor  # [max_batch_tokens, hidden]
    qkv: Tensor  # [max_batch_tokens, (num_heads + 2 · num_kv_heads) · head_dim]
    delta: Tensor  # [max_batch_tokens, hidden], what attention or feed-forward adds
    gate_up: Tensor  # [max_batch_tokens, 2 · intermediate]
    attended: Tensor  # [max_batch_tokens, num_heads · head_dim]
    activated: Tensor  # [max_batch_tokens, intermediate]
    feature_layer_ids: tuple[int, ...]
    features: Tensor  # [max_batch_tokens, layers · hidden]; outputs of the feature layers, in their order
    programs: dict[tuple[int, ...], tuple[Program, ...]] = field(default_factory=dict)
    """Recorded forwards by row count, page table address and threads: a program for each span of layers."""


def page_bytes(config: TargetConfig, dtype: torch.dtype) -> int:
    """Bytes of one K/V page, all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * PAGE_SIZE * dtype.itemsize


class TargetModel:
    """Weights and operations; all state is in the caller's Workspace."""

    def __init__(
        self, config: TargetConfig, weights: TargetWeights, ops: Ops, kv_dtype: torch.dtype | None = None
    ) -> None:
        """K/V pages are `kv_dtype`, by default as wide as the rows (`kernels.kv_pages`)."""
        self.config, self.weights, self._ops = config, weights, ops
        self.kv_dtype = kv_dtype or weights.embedding.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one K/V page, all layers."""
        return page_bytes(self.config, self.kv_dtype)

    def workspace(
        self, num_pages: int, max_model_len: int, max_batch_tokens: int, feature_layer_ids: Sequence[int] = ()
    ) -> Workspace:
        """Allocates a session's memory where the weights are, rows in the type of the embedding; pages start as zeros,
        whose memory the system commits when first written.

        Raises MemoryError (or torch's RuntimeError) if there is not enough.
        """
        config, like = self.config, self.weights.embedding
        heads, head_dim = config.num_kv_heads, config.head_dim
        rope = rope_tables(config.rope_source, max_model_len)

        def rows(width: int) -> Tensor:
            return like.new_empty(max_batch_tokens, width)

        def pages(*shape: int) -> tuple[Tensor, ...]:
            layers = range(config.num_layers)
            return tuple(zero_pages(num_pages, heads, *shape, dtype=self.kv_dtype, device=like.device) for _ in layers)

        return Workspace(
            keys=pages(head_dim, PAGE_SIZE),
            values=pages(PAGE_SIZE, head_dim),
            cos=rope.cos.to(like.device),
            sin=rope.sin.to(like.device),
            positions=torch.empty(max_batch_tokens, dtype=torch.int32),
            slots=torch.empty(max_batch_tokens, dtype=torch.int32),
            residual=rows(config.hidden_size),
            normed=rows(config.hidden_size),
            qkv=rows((config.num_heads + 2 * heads) * head_dim),
            delta=rows(config.hidden_size),
            gate_up=rows(2 * config.intermediate_size),
            attended=rows(config.num_heads * head_dim),
            activated=rows(config.intermediate_size),
            feature_layer_ids=tuple(feature_layer_ids),
            features=rows(len(feature_layer_ids) * config.hidden_size),
        )

    def forward(self, rows: TokenRows, page_table: Tensor, space: Workspace) -> Tensor:
        """Computes every row, writing its K/V to its page and its features to `space.features`.

        `page_table` is int32 [num_slots, max_pages]. Returns the residual stream after the final norm,
        [num_rows, hidden], valid until the next call; row i's features are `space.features[i]`.
        """
        num_rows, hidden = len(rows.token_ids), self.config.hidden_size
        residual = space.residual[:num_rows]
        torch.index_select(self.weights.embedding, 0, rows.token_ids, out=residual)
        spans = self._spans(space.feature_layer_ids)
        programs = self._programs(rows, page_table, space, spans)
        for index, span in enumerate(spans):
            if programs:
                programs[index].run()
            else:
                self._run_layers(span, rows, page_table, space)
            for place, layer_id in enumerate(space.feature_layer_ids):
                if layer_id == span[-1]:
                    space.features[:num_rows, place * hidden : (place + 1) * hidden] = residual
        return space.normed[:num_rows]

    def _spans(self, feature_layer_ids: Sequence[int]) -> list[range]:
        """All layers, cut after every feature layer."""
        num_layers = self.config.num_layers
        ends = sorted({*(layer_id + 1 for layer_id in feature_layer_ids), num_layers})
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def _programs(
        self, rows: TokenRows, page_table: Tensor, space: Workspace, spans: list[range]
    ) -> tuple[Program, ...]:
        """The recorded forward of that many rows, ready to run; empty where there is none."""
        num_rows = len(rows.token_ids)
        if not self._ops.is_compiled or not 0 < num_rows <= _MAX_RECORDED_ROWS:
            return ()
        space.positions[:num_rows], space.slots[:num_rows] = rows.positions, rows.slots
        key = num_rows, page_table.data_ptr(), num_threads()
        if key not in space.programs:
            if any(linear.exact_counts for linear in self.weights.linears):  # padding is not a kernel
                return ()
            held = rows._replace(positions=space.positions[:num_rows], slots=space.slots[:num_rows])
            space.programs[key] = tuple(self._record(span, held, page_table, space) for span in spans)
        return space.programs[key]

    def _record(self, span: range, rows: TokenRows, page_table: Tensor, space: Workspace) -> Program:
        with recording() as made:
            self._run_layers(span, rows, page_table, space)
        return Program(made)

    def _run_layers(self, span: range, rows: TokenRows, page_table: Tensor, space: Workspace) -> None:
        """Takes `space.residual` through layers; `space.normed` becomes what the next layer or lm_head reads."""
        config, weights, ops, eps = self.config, self.weights, self._ops, self.config.rms_norm_eps
        buffers = space.residual, space.normed, space.qkv, space.attended, space.delta, space.gate_up, space.activated
        residual, normed, qkv, attended, delta, gate_up, activated = (part[: len(rows.token_ids)] for part in buffers)
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        if span.start == 0:
            ops.rms_norm(residual, weights.layers[0].input_norm, eps, normed)
        for index in span:
            layer = weights.layers[index]
            ops.paged_attention(
                layer.qkv(normed, qkv),
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
            ops.add_rms_norm(residual, layer.output(attended, delta), layer.post_attention_norm, eps, normed)
            ops.silu_mul(layer.gate_up(normed, gate_up), activated)
            ops.add_rms_norm(residual, layer.down(activated, delta), next_norms[index], eps, normed)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, vocab] of rows of `forward`'s result."""
        return self.weights.lm_head(hidden)
