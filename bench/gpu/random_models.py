"""A target and a drafter of random weights on a device, and the pieces of their steps as functions to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config

from kernels.aot_cases import Model
from kernels.linear.dense import DenseLinear, Placement
from kernels.markov_sample import MarkovKind
from kernels.markov_sample.triton import Blocks, ConfidenceTensors, HeadTensors, sample_blocks
from kernels.registry import load_ops
from kernels.rejection_sample.triton import DraftDistributions, WindowOutcomes, Windows, accept_rows
from kernels.sampling import Regime, SlotSampling
from kernels.triton.rows import SamplingRows
from service_kit.gpu import Gpu
from verifier_service.config import SamplingDefaults, TargetConfig
from verifier_service.model import PAGE_SIZE, TargetModel, TokenRows
from verifier_service.weights import LayerWeights, TargetWeights

_SCALE = 0.02


class WindowRows(NamedTuple):
    """Verify windows of [anchor, drafts] at the end of contexts, one slot each."""

    rows: TokenRows
    page_table: Tensor

    def first(self, count: int) -> WindowRows:
        """The first rows alone."""
        return WindowRows(TokenRows(*(values[:count] for values in self.rows)), self.page_table)


@dataclass(frozen=True)
class RandomPair:
    """Everything that is measured."""

    model: Model
    gpu: Gpu
    target: TargetModel
    reference: TargetModel
    """The same weights with plain torch's operations."""
    drafter: TargetModel
    """The drafter's layers as a decoder of their own: what a block costs but for the direction of its attention."""
    head_tensors: HeadTensors
    confidence: ConfidenceTensors
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """Largest difference of logits, relative to the largest logit."""
        return 1e-4 if self.dtype == torch.float32 else 5e-2

    @property
    def _window(self) -> int:
        return self.model.block_size + 1

    def windows(self, tier: int, context: int) -> WindowRows:
        """`tier` rows in windows."""
        device, slots = self.gpu.device, max(1, tier // self._window)
        index = torch.arange(tier, device=device)
        pages = -(-context // PAGE_SIZE)
        positions = context - self._window + index % self._window
        rows = TokenRows(index % self.model.vocab, positions.int(), (index // self._window).int())
        return WindowRows(rows, torch.arange(slots * pages, dtype=torch.int32, device=device).view(slots, pages))

    def _space(self, rows: WindowRows, target: TargetModel) -> Any:
        pages, context = rows.page_table.numel(), rows.page_table.shape[1] * PAGE_SIZE
        space = target.workspace(pages, context, len(rows.rows.token_ids))
        between = space.residual, space.normed, space.qkv, space.delta, space.gate_up, space.activated, space.attended
        for index, tensor in enumerate((*space.keys, *space.values, *between)):
            generator = torch.Generator(self.gpu.device).manual_seed(index)
            tensor.normal_(generator=generator)
        return space

    def logits(self, rows: WindowRows, kind: Literal["triton", "reference"]) -> Tensor:
        """Of a forward."""
        target = self.target if kind == "triton" else self.reference
        return target.logits(target.forward(rows.rows, rows.page_table, self._space(rows, target))).float()

    def attention(self, rows: WindowRows) -> Tensor:
        """Of the first layer, over rows that are the same whatever is beside them."""
        space = self._space(rows, self.target)
        generator = torch.Generator(self.gpu.device).manual_seed(7)
        count = len(rows.rows.token_ids)
        for row in space.qkv:  # one by one: random numbers of a row must not depend on how many there are
            row.copy_(torch.randn(len(row), generator=generator, device=self.gpu.device))
        self._attend(rows, space, 0)
        result: Tensor = space.attended[:count].clone()
        return result

    def _attend_all(self, rows: WindowRows, space: Any) -> None:
        for index in range(len(self.target.weights.layers)):
            self._attend(rows, space, index)

    def _attend(self, rows: WindowRows, space: Any, index: int) -> None:
        layer, eps = self.target.weights.layers[index], self.target.config.rms_norm_eps
        place = rows.rows.positions, rows.rows.slots, rows.page_table, space.cos, space.sin
        pages = space.keys[index], space.values[index]
        load_ops("triton").paged_attention(
            space.qkv, *place, *pages, layer.q_norm, layer.k_norm, eps, 0, space.attended
        )

    def kernels(self, tier: int, context: int) -> Iterator[tuple[str, Callable[[], object]]]:
        """Kernels by their names in `bench.gpu.floors`, all layers of one step each."""
        rows, ops, eps = self.windows(tier, context), load_ops("triton"), self.target.config.rms_norm_eps
        space, layers = self._space(rows, self.target), self.target.weights.layers

        def linears(name: str, source: Tensor, out: Tensor) -> Callable[[], object]:
            return lambda: [getattr(layer, name)(source, out) for layer in layers]

        yield "qkv projection", linears("qkv", space.normed, space.qkv)
        yield "output projection", linears("output", space.attended, space.delta)
        yield "gate and up projection", linears("gate_up", space.normed, space.gate_up)
        yield "down projection", linears("down", space.activated, space.delta)
        yield (
            "add_rms_norm",
            lambda: [
                ops.add_rms_norm(space.residual, space.delta, norm, eps, space.normed)
                for layer in layers
                for norm in (layer.input_norm, layer.post_attention_norm)
            ],
        )
        yield "silu_mul", lambda: [ops.silu_mul(space.gate_up, space.activated) for _ in layers]
        yield "ragged verify attention", lambda: self._attend_all(rows, space)
        yield "lm_head", lambda: self.target.weights.lm_head(space.normed)
        yield "acceptance", self.acceptance(tier, self.target.weights.lm_head(space.normed))
        yield "draft block attention", self._block_attention(tier, context)
        yield "Markov head and sampling", self.head(tier)

    def _block_attention(self, tier: int, context: int) -> Callable[[], object]:
        windows = self.windows(tier, context)
        slots, layers = len(windows.page_table), self.drafter.weights.layers
        space, block = self._space(windows, self.drafter), self.model.block_size
        anchors = torch.full((slots,), context - self._window, dtype=torch.int32, device=self.gpu.device)
        place = anchors, torch.arange(slots, dtype=torch.int32, device=self.gpu.device), block, windows.page_table
        qkv, out = (tensor[: slots * block] for tensor in (space.qkv, space.attended))
        attend, eps = load_ops("triton").block_attention, self.target.config.rms_norm_eps
        return lambda: [
            attend(
                qkv, *place, space.cos, space.sin, space.keys[index], space.values[index], layer.q_norm, layer.k_norm,
                eps, 0, out,
            )
            for index, layer in enumerate(layers)
        ]  # fmt: skip

    def acceptance(self, tier: int, logits: Tensor) -> Callable[[], None]:
        device, slots, block = self.gpu.device, max(1, tier // self._window), self.model.block_size
        wide = torch.arange(slots, device=device)
        windows = Windows(
            (torch.arange(tier, device=device) // self._window).int(),
            (wide * self._window).int(),
            torch.full((slots,), block, dtype=torch.int32, device=device),
            torch.zeros(slots, block, dtype=torch.int32, device=device),
            wide,
            wide,
        )
        probs = torch.full((slots, block, self.model.vocab), 1 / self.model.vocab, device=device)
        outcomes = WindowOutcomes(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, block + 1, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )
        rows, drafts = self._sampling(slots), DraftDistributions(probs, wide.int())
        return lambda: accept_rows(logits, windows, rows, drafts, outcomes)

    def _sampling(self, slots: int) -> SamplingRows:
        return SamplingRows.of([SlotSampling(Regime.REJECTION, key=key) for key in range(slots)], self.gpu.device)

    def verify_step(self, tier: int, context: int) -> Callable[[], None]:
        """Forward, logits and acceptance of a tier."""
        rows = self.windows(tier, context)
        space = self._space(rows, self.target)
        logits = space.residual.new_empty(tier, self.model.vocab)
        accept = self.acceptance(tier, logits)

        def run() -> None:
            self.target.weights.lm_head(self.target.forward(rows.rows, rows.page_table, space), logits)
            accept()

        return run

    def backbone(self, tier: int, context: int) -> Callable[[], object]:
        """The drafter's layers and base logits for a block of each slot of a tier."""
        slots = max(1, tier // self._window)
        rows = self.windows(slots * self._window, context)
        kept = torch.arange(slots * self.model.block_size, device=self.gpu.device)
        kept = kept // self.model.block_size * self._window + kept % self.model.block_size
        rows = WindowRows(TokenRows(*(values[kept] for values in rows.rows)), rows.page_table)
        space = self._space(rows, self.drafter)
        return lambda: self.drafter.logits(self.drafter.forward(rows.rows, rows.page_table, space))

    def head(self, tier: int) -> Callable[[], None]:
        """The sequential head for a block of each slot of a tier."""
        device, slots, block, vocab = (
            self.gpu.device,
            max(1, tier // self._window),
            self.model.block_size,
            self.model.vocab,
        )
        logits = torch.randn(slots, block, vocab, device=device).to(self.dtype)
        hidden = torch.randn(slots, block, self.model.hidden, device=device).to(self.dtype)
        wide, rows = torch.arange(slots, device=device), self._sampling(slots)
        blocks = Blocks(
            torch.zeros(slots, block, dtype=torch.int32, device=device),
            torch.zeros(slots, block, device=device),
            torch.zeros(slots, block, vocab, device=device),
            wide.int(),
        )
        return lambda: sample_blocks(
            logits, hidden, self.head_tensors, self.confidence, wide.int(), rows, wide, wide, None, blocks
        )


def make_pair(model: Model, gpu: Gpu, dtype: torch.dtype) -> RandomPair:
    """Random weights on the device."""
    placement = Placement(gpu.device, dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=gpu.device, dtype=dtype) * _SCALE

    def linear(num_in: int, num_out: int) -> DenseLinear:
        return DenseLinear(random(num_out, num_in), None, placement)

    def ones(width: int) -> Tensor:
        return torch.ones(width, device=gpu.device, dtype=dtype)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=ones(model.hidden),
            qkv=linear(model.hidden, model.q_size + 2 * model.kv_size),
            q_norm=ones(model.head_dim),
            k_norm=ones(model.head_dim),
            output=linear(model.q_size, model.hidden),
            post_attention_norm=ones(model.hidden),
            gate_up=linear(model.hidden, 2 * model.intermediate),
            down=linear(model.intermediate, model.hidden),
        )

    embedding, lm_head = random(model.vocab, model.hidden), linear(model.hidden, model.vocab)

    def decoder(num_layers: int, kind: Literal["triton", "reference"], weights: TargetWeights | None) -> TargetModel:
        if weights is None:
            layers = tuple(layer() for _ in range(num_layers))
            weights = TargetWeights(embedding, layers, ones(model.hidden), lm_head)
        return TargetModel(_config(model, num_layers), weights, load_ops(kind))

    target = decoder(model.num_layers, "triton", None)
    rank = model.markov_rank
    return RandomPair(
        model,
        gpu,
        target,
        decoder(model.num_layers, "reference", target.weights),
        decoder(model.draft_layers, "triton", None),
        HeadTensors(MarkovKind.VANILLA, random(model.vocab, rank), random(model.vocab, rank)),
        ConfidenceTensors(random(1, model.hidden), random(rank), torch.zeros(1, device=gpu.device)),
        dtype,
    )


def _config(model: Model, num_layers: int) -> TargetConfig:
    source = Qwen3Config(
        hidden_size=model.hidden,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=40960,
    )
    return TargetConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_layers=num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=1e-6,
        max_position=source.max_position_embeddings,
        has_attention_bias=False,
        has_mlp_bias=False,
        has_qk_norm=True,
        is_tied=False,
        windows=(0,) * num_layers,
        eos_token_ids=(),
        sampling_defaults=SamplingDefaults(),
        rope_source=source,
    )
