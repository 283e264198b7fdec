"""The target's weights: checked by name and shape, q·k·v and gate·up packed into one linear layer each."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.linear import Linear, make_linear
from kernels.linear import WeightFormat as FloatFormat
from kernels.linear.dense import DenseLinear, Placement
from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError
from verifier_service.config import TargetConfig
from verifier_service.stored_levels import StoredLevels

WeightFormat = Literal["float32", "fp16", "q4", "bf16"]
"""Of the linear layers; q4 is the levels of the .gguf file beside the tensors, of 4 or 8 bits as they are stored, bf16
all tensors of a model on a GPU."""

_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers that old exports carry and the configuration already determines."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden → (num_heads + 2 num_kv_heads) · head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # num_heads · head_dim → hidden
    post_attention_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden → 2 · intermediate
    down: Linear  # intermediate → hidden


@dataclass(frozen=True)
class TargetWeights:
    """The whole model."""

    embedding: Tensor  # [vocab, hidden] float32, on a GPU bfloat16 as the norms
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Linear  # hidden → vocab

    @property
    def num_bytes(self) -> int:
        """Of all tensors but the norms."""
        return self.embedding.numel() * self.embedding.element_size() + sum(each.weight_bytes for each in self.linears)

    @property
    def linears(self) -> Iterator[Linear]:
        """Every linear layer, lm_head last."""
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.lm_head

    def padded_rows(self, num_rows: int) -> int:
        """Most rows that one of the linear layers computes for `num_rows` rows."""
        return max(linear.padded_rows(num_rows) for linear in self.linears)


def load_weights(
    checkpoint: Checkpoint, config: TargetConfig, weight_format: WeightFormat, placement: Placement | None = None
) -> TargetWeights:
    """Loads all weights and packs them, or puts them as they are on a device in its type.

    Raises ConfigurationError naming tensors that are missing, unexpected or bad.
    """
    layer_shapes = _layer_shapes(config)
    names = ["model.embed_tokens.weight", "model.norm.weight", *([] if config.is_tied else ["lm_head.weight"])]
    for index in range(config.num_layers):
        names += [f"model.layers.{index}.{name}" for name in layer_shapes]
    ignored = re.compile(f"{_IGNORED.pattern}|lm_head\\.weight") if config.is_tied else _IGNORED
    checkpoint.require_names(names, ignored=ignored)

    make = _maker(checkpoint, weight_format, placement)
    put = placement.put if placement else lambda tensor: tensor

    def pack(name: str, weight_names: Sequence[str], weight: Tensor, bias: Tensor | None = None) -> Linear:
        try:
            return make(weight_names, weight, bias)
        except ValueError as error:
            raise ConfigurationError(f"{checkpoint.name}: {name}: {error}", field="weight_format") from error

    def load_layer(index: int) -> LayerWeights:
        def joined(*names: str) -> Tensor | None:
            """Tensors below each other, read straight into place; None where the configuration has none."""
            if names[0] not in layer_shapes:
                return None
            shapes = [layer_shapes[name] for name in names]
            sizes = [shape[0] for shape in shapes]
            whole = torch.empty(sum(sizes), *shapes[0][1:])
            for name, shape, part in zip(names, shapes, torch.split(whole, sizes), strict=True):
                checkpoint.read(f"model.layers.{index}.{name}", shape, out=part)
            return whole

        def linear(*projections: str) -> Linear:
            names = [f"{name}_proj.weight" for name in projections]
            weight = joined(*names)
            bias = joined(*(f"{name}_proj.bias" for name in projections))
            assert weight is not None
            return pack(
                f"layer {index}, {projections[0]}", [f"model.layers.{index}.{name}" for name in names], weight, bias
            )

        def norm(name: str) -> Tensor:
            return put(checkpoint.read(f"model.layers.{index}.{name}.weight", layer_shapes[f"{name}.weight"]))

        return LayerWeights(
            input_norm=norm("input_layernorm"),
            qkv=linear("self_attn.q", "self_attn.k", "self_attn.v"),
            q_norm=norm("self_attn.q_norm") if config.has_qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.has_qk_norm else None,
            output=linear("self_attn.o"),
            post_attention_norm=norm("post_attention_layernorm"),
            gate_up=linear("mlp.gate", "mlp.up"),
            down=linear("mlp.down"),
        )

    embedding_shape = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.read("model.embed_tokens.weight", embedding_shape)
    head_name = "model.embed_tokens.weight" if config.is_tied else "lm_head.weight"
    head = embedding if config.is_tied else checkpoint.read(head_name, embedding_shape)
    weights = TargetWeights(
        embedding=put(embedding),
        layers=tuple(load_layer(index) for index in range(config.num_layers)),
        final_norm=put(checkpoint.read("model.norm.weight", (config.hidden_size,))),
        lm_head=pack("lm_head", [head_name], head),
    )
    norms = [weights.final_norm, *(norm for layer in weights.layers for norm in (layer.input_norm, layer.q_norm))]
    if all(bool((norm == 1).all()) for norm in norms if norm is not None):
        logger.warning("%s: every norm weight is exactly 1: an untrained or badly exported target", checkpoint.name)
    return weights


def _maker(
    checkpoint: Checkpoint, weight_format: WeightFormat, placement: Placement | None
) -> Callable[[Sequence[str], Tensor, Tensor | None], Linear]:
    """What makes a linear layer from its tensors' names, its weight and its bias."""
    if placement is not None:
        return lambda names, weight, bias: DenseLinear(weight, bias, placement)
    if weight_format == "q4":
        return StoredLevels(checkpoint).linear
    if weight_format == "bf16":
        raise ConfigurationError("weight_format bf16 is for a GPU: set device to cuda", field="weight_format")
    float_format: FloatFormat = weight_format
    return lambda names, weight, bias: make_linear(weight, bias, float_format)


def _layer_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Names (within a layer) and shapes of one layer's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q": (q_size, hidden),
        "self_attn.k": (kv_size, hidden),
        "self_attn.v": (kv_size, hidden),
        "self_attn.o": (hidden, q_size),
        "mlp.gate": (inner, hidden),
        "mlp.up": (inner, hidden),
        "mlp.down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.has_qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    for name, shape in projections.items():
        shapes[f"{name}_proj.weight"] = shape
        if config.has_attention_bias if name.startswith("self_attn") else config.has_mlp_bias:
            shapes[f"{name}_proj.bias"] = shape[:1]
    return shapes
