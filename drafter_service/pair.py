"""Whether a drafter checkpoint is whole and fits a target: decided from configurations and headers, before any weight.

The embedding and the lm_head are the target's. A drafter may ship frozen copies; those are then used, since they are
what it was trained with.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from drafter_service.config import DrafterConfig, parse_config
from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError

EMBEDDING, LM_HEAD, DRAFT_TO_TARGET = "embed_tokens.weight", "lm_head.weight", "d2t"
TARGET_EMBEDDING, TARGET_LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = re.compile(r"embed_tokens\.weight|lm_head\.weight|t2d|rotary_emb\.inv_freq")
"""Optional, of use in training only, or derived from the configuration."""


class Pair(NamedTuple):
    """A drafter and its target, checked against each other; weights not read yet."""

    config: DrafterConfig
    drafter: Checkpoint
    target: Checkpoint

    @property
    def num_values(self) -> int:
        """Of all tensors that the drafter's process holds: its own, and the target's where it has none."""
        borrowed = {(checkpoint.name, name): checkpoint.shapes[name] for checkpoint, name in self._borrowed}
        return self.drafter.num_values + sum(math.prod(shape) for shape in borrowed.values())

    @property
    def _borrowed(self) -> list[tuple[Checkpoint, str]]:
        sources = (self.embedding_source, self.lm_head_source)
        return [source for source in sources if source[0] is not self.drafter]

    @property
    def embedding_source(self) -> tuple[Checkpoint, str]:
        """Checkpoint and tensor of the input embedding."""
        if EMBEDDING in self.drafter.shapes:
            return self.drafter, EMBEDDING
        return self.target, TARGET_EMBEDDING

    @property
    def lm_head_source(self) -> tuple[Checkpoint, str]:
        """Checkpoint and tensor of the output projection; rows are target ids unless there are draft_vocab_size."""
        if LM_HEAD in self.drafter.shapes:
            return self.drafter, LM_HEAD
        return self.target, TARGET_LM_HEAD if TARGET_LM_HEAD in self.target.shapes else TARGET_EMBEDDING


def check_pair(drafter: str | Path, target: str | Path) -> Pair:
    """Opens both checkpoints (directories or hub ids) and checks everything that needs no weights.

    Raises ConfigurationError in words: a format that is not implemented, a mismatch with both numbers, or tensors that
    are missing, unexpected or of another shape.
    """
    drafter_checkpoint, target_checkpoint = Checkpoint(str(drafter)), Checkpoint(str(target))
    pair = Pair(parse_config(drafter_checkpoint.config), drafter_checkpoint, target_checkpoint)
    _check_target(pair)
    _check_tensors(pair)
    return pair


def _check_target(pair: Pair) -> None:
    config, target = pair.config, pair.target.config
    for key, own_key, own in (
        ("num_hidden_layers", "num_target_layers", config.num_target_layers),
        ("hidden_size", "hidden_size", config.hidden_size),
        ("vocab_size", "vocab_size", config.vocab_size),
    ):
        if target.get(key) != own:
            raise ConfigurationError(
                f"the drafter was made for another target: its {own_key} is {own}, {key} of {pair.target.name} is "
                f"{target.get(key)}",
                field=own_key,
            )


def _check_tensors(pair: Pair) -> None:
    config, expected = pair.config, expected_shapes(pair.config)
    pair.drafter.require_names(expected, ignored=_IGNORED)
    target_vocab = (config.vocab_size, config.hidden_size)
    allowed: dict[str, tuple[tuple[int, ...], ...]] = {name: (shape,) for name, shape in expected.items()}
    allowed[EMBEDDING] = (target_vocab,)
    allowed[LM_HEAD] = (target_vocab, (config.draft_vocab_size, config.hidden_size))
    checks = [(pair.drafter, name, shapes) for name, shapes in allowed.items() if name in pair.drafter.shapes]
    checks += [(*pair.embedding_source, allowed[EMBEDDING]), (*pair.lm_head_source, allowed[LM_HEAD])]
    for checkpoint, name, shapes in checks:
        if checkpoint.shapes.get(name) not in shapes:
            found = list(checkpoint.shapes[name]) if name in checkpoint.shapes else "missing"
            raise ConfigurationError(
                f"{checkpoint.name}: tensor {name} is {found}, the drafter's configuration asks for "
                f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))}",
                field="model",
            )


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors a checkpoint of this configuration must hold."""
    hidden, rank = config.hidden_size, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    if config.is_vocab_reduced:
        shapes[DRAFT_TO_TARGET] = (config.draft_vocab_size,)
    if config.markov_head_type is not None:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.markov_head_type == "gated":
        shapes |= _linear("markov_head.gate_proj", rank, hidden + rank, has_bias=True)
    if config.markov_head_type == "rnn":
        shapes |= _linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden, has_bias=True)
    if config.has_confidence_head:
        width = hidden + (rank if config.confidence_has_markov else 0)
        shapes |= _linear("confidence_head.proj", 1, width, has_bias=True)
    return shapes


def _layer_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **_linear("self_attn.q_proj", query_size, hidden, config.attention_bias),
        **_linear("self_attn.k_proj", kv_size, hidden, config.attention_bias),
        **_linear("self_attn.v_proj", kv_size, hidden, config.attention_bias),
        **_linear("self_attn.o_proj", hidden, query_size, config.attention_bias),
        **_linear("mlp.gate_proj", inner, hidden, config.mlp_bias),
        **_linear("mlp.up_proj", inner, hidden, config.mlp_bias),
        **_linear("mlp.down_proj", hidden, inner, config.mlp_bias),
    }
    if config.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def _linear(name: str, num_out: int, num_in: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (num_out, num_in)}
    if has_bias:
        shapes[f"{name}.bias"] = (num_out,)
    return shapes
