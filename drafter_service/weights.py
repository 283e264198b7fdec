"""Weights of a drafter, read from its checkpoint and its target's and packed for the forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_service.config import DrafterConfig
from drafter_service.pair import DRAFT_TO_TARGET, Pair, expected_shapes
from kernels.linear import Linear, make_linear, make_quantized_linear
from kernels.linear.dense import DenseLinear, Placement
from kernels.markov_sample import ConfidenceHead, MarkovHead, MarkovKind
from service_kit.errors import ConfigurationError

WeightFormat = Literal["float32", "fp16", "q8", "bf16"]
"""Of the linear layers; q8 is int8 levels with a float16 scale for each 32 inputs of an output, bf16 all tensors of a
drafter on a GPU."""
_GROUP, _MAX_LEVEL = 32, 127


@dataclass(frozen=True)
class LayerWeights:
    """One draft layer. Projections of the same input are packed into one."""

    input_norm: Tensor  # [H]
    qkv: Linear  # H -> (Hq + 2·Hkv)·D
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    context_kv: Linear  # H -> 2·Hkv·D: K and V of context positions
    o: Linear  # Hq·D -> H
    post_attention_norm: Tensor  # [H]
    gate_up: Linear  # H -> 2·I
    down: Linear  # I -> H
    window: int


@dataclass(frozen=True)
class DrafterWeights:
    """Everything a draft pass reads."""

    embedding: Tensor  # [V, H], float32 or float16 as the weight format says
    context_fc: Linear  # features -> H
    context_norm: Tensor  # [H]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H]
    lm_head: Linear  # H -> Vd
    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    draft_to_target: npt.NDArray[np.uint32] | None  # [Vd] target ids; None for the whole vocabulary

    @property
    def num_bytes(self) -> int:
        """Of all tensors but norms and the confidence head."""
        linears = [self.context_fc, self.lm_head]
        for layer in self.layers:
            linears += [layer.qkv, layer.context_kv, layer.o, layer.gate_up, layer.down]
        markov_bytes = 0 if self.markov is None else self.markov.w1.nbytes + self.markov.w2.nbytes
        embedding_bytes = self.embedding.numel() * self.embedding.element_size()
        return embedding_bytes + markov_bytes + sum(linear.weight_bytes for linear in linears)


def default_format(config: DrafterConfig) -> WeightFormat:
    """q8, which drafts as well as fp16 and reads half its bytes, where the drafter's widths allow it."""
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim, config.feature_size)
    return "q8" if all(width % _GROUP == 0 for width in widths) else "fp16"


class _Reader:
    """Reads tensors of the drafter by name, in the shapes its configuration asks for."""

    def __init__(self, pair: Pair, weight_format: WeightFormat, placement: Placement | None) -> None:
        self._checkpoint, self._shapes = pair.drafter, expected_shapes(pair.config)
        self._format: WeightFormat = weight_format
        self._placement = placement

    def tensor(self, name: str) -> Tensor:
        return self.put(self._read(name))

    def put(self, tensor: Tensor) -> Tensor:
        """`tensor` where the drafter runs."""
        return tensor if self._placement is None else self._placement.put(tensor)

    def _read(self, name: str) -> Tensor:
        return self._checkpoint.read(name, self._shapes[name])

    def optional(self, name: str) -> Tensor | None:
        return self.tensor(name) if name in self._shapes else None

    def array(self, name: str) -> npt.NDArray[np.float32]:
        return self._read(name).numpy()

    def stacked(self, *names: str) -> tuple[Tensor, Tensor | None]:
        """Weights of projections of one input, one under the other, and their biases likewise."""
        biases = [self._read(f"{name}.bias") for name in names if f"{name}.bias" in self._shapes]
        weight = torch.cat([self._read(f"{name}.weight") for name in names])
        return weight, torch.cat(biases) if biases else None

    def linear(self, *names: str) -> Linear:
        """One packed linear layer for all `names`."""
        return self.packed(names[0], *self.stacked(*names))

    def packed(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A linear layer in the reader's format; `name` is said if it does not fit."""
        if self._placement is not None:
            return DenseLinear(weight, bias, self._placement)
        try:
            if self._format == "bf16":
                raise ValueError("weight_format bf16 is for a GPU: set device to cuda")
            if self._format == "q8":
                return make_quantized_linear(*rounded_to_levels(weight), None, bias)
            return make_linear(weight, bias, self._format)
        except ValueError as error:
            raise ConfigurationError(f"{self._checkpoint.name}: {name}: {error}", field="weight_format") from error


def load_weights(pair: Pair, weight_format: WeightFormat, placement: Placement | None = None) -> DrafterWeights:
    """Reads a checked pair and packs it, or puts it as it is on a device in its type; the heads stay numpy arrays.

    Raises ConfigurationError naming a tensor that is corrupt or does not fit the format.
    """
    config, read = pair.config, _Reader(pair, weight_format, placement)
    draft_to_target = _draft_to_target(pair)
    embedding_checkpoint, embedding_name = pair.embedding_source
    embedding = embedding_checkpoint.read(embedding_name, (config.vocab_size, config.hidden_size))
    if placement is not None:
        embedding = placement.put(embedding)
    elif weight_format != "float32" and not (embedding := embedding.half()).isfinite().all():
        raise ConfigurationError(
            f"{embedding_checkpoint.name}: a value of tensor {embedding_name} is too large for float16: use weight "
            "format float32",
            field="weight_format",
        )
    return DrafterWeights(
        embedding=embedding,
        context_fc=read.linear("fc"),
        context_norm=read.tensor("hidden_norm.weight"),
        layers=tuple(_layer(read, i, window) for i, window in enumerate(config.windows)),
        final_norm=read.tensor("norm.weight"),
        lm_head=read.packed("lm_head", _lm_head_rows(pair, draft_to_target)),
        markov=_markov(read, config),
        confidence=_confidence(read, config),
        draft_to_target=draft_to_target,
    )


def rounded_to_levels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels int8 [N, K] and scales float16 [N, K / 32] nearest to weight [N, K].

    Raises ValueError if K is not a multiple of 32, or a scale is beyond float16.
    """
    num_out, num_in = weight.shape
    if num_in % _GROUP:
        raise ValueError(f"{num_in} inputs do not divide into groups of {_GROUP}: use weight format fp16")
    groups = weight.view(num_out, -1, _GROUP)
    scales = (groups.abs().amax(dim=-1) / _MAX_LEVEL).half()
    if not scales.isfinite().all():
        raise ValueError("a weight is too large for q8: use weight format float32")
    # By the scale as it is stored; the smallest float16 stands for groups whose scale is 0.
    divisors = scales.float().clamp(min=torch.finfo(torch.float16).smallest_normal / 1024)
    levels = (groups / divisors.unsqueeze(-1)).round().clamp(-_MAX_LEVEL, _MAX_LEVEL)
    return levels.to(torch.int8).view(num_out, num_in), scales


def _layer(read: _Reader, index: int, window: int) -> LayerWeights:
    name = f"layers.{index}"
    return LayerWeights(
        input_norm=read.tensor(f"{name}.input_layernorm.weight"),
        qkv=read.linear(*(f"{name}.self_attn.{p}_proj" for p in "qkv")),
        q_norm=read.optional(f"{name}.self_attn.q_norm.weight"),
        k_norm=read.optional(f"{name}.self_attn.k_norm.weight"),
        context_kv=read.linear(*(f"{name}.self_attn.{p}_proj" for p in "kv")),
        o=read.linear(f"{name}.self_attn.o_proj"),
        post_attention_norm=read.tensor(f"{name}.post_attention_layernorm.weight"),
        gate_up=read.linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
        down=read.linear(f"{name}.mlp.down_proj"),
        window=window,
    )


def _draft_to_target(pair: Pair) -> npt.NDArray[np.uint32] | None:
    """Target ids of the draft vocabulary from their offsets: target = draft + d2t[draft]."""
    config = pair.config
    if not config.is_vocab_reduced:
        return None
    offsets = pair.drafter.read(DRAFT_TO_TARGET, (config.draft_vocab_size,), kind="int").numpy()
    ids: npt.NDArray[np.int64] = np.arange(config.draft_vocab_size) + offsets
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != len(ids):
        raise ConfigurationError(
            f"{pair.drafter.name}: tensor {DRAFT_TO_TARGET} gives target ids {ids.min()} ... {ids.max()} with "
            f"{len(ids) - len(np.unique(ids))} repeats: they must be distinct and below {config.vocab_size}",
            field="model",
        )
    return ids.astype(np.uint32)


def _lm_head_rows(pair: Pair, draft_to_target: npt.NDArray[np.uint32] | None) -> Tensor:
    """Rows of the output projection for the draft vocabulary, [Vd, H]."""
    checkpoint, name = pair.lm_head_source
    weight = checkpoint.read(name, checkpoint.shapes[name])
    if draft_to_target is None or len(weight) == len(draft_to_target):
        return weight
    return weight[torch.from_numpy(draft_to_target.astype(np.int64))]


def _markov(read: _Reader, config: DrafterConfig) -> MarkovHead | None:
    if config.markov_head_type is None:
        return None
    kind = MarkovKind(config.markov_head_type)
    projection = {MarkovKind.GATED: "markov_head.gate_proj", MarkovKind.RNN: "markov_head.joint_proj"}.get(kind)
    return MarkovHead(
        kind=kind,
        w1=read.array("markov_head.markov_w1.weight"),
        w2=read.array("markov_head.markov_w2.weight"),
        projection=read.array(f"{projection}.weight") if projection else None,
        projection_bias=read.array(f"{projection}.bias") if projection else None,
    )


def _confidence(read: _Reader, config: DrafterConfig) -> ConfidenceHead | None:
    if not config.has_confidence_head:
        return None
    return ConfidenceHead(read.array("confidence_head.proj.weight"), float(read.array("confidence_head.proj.bias")[0]))
