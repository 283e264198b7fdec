"""Checkpoints of a target whose every next token is known and of a drafter that knows a set share of them.

All tokens lie on one cycle in random order. The target continues token x with the one behind it: row y of lm_head is
the embedding of the token before y, and what the layers add to the residual is small. The drafter's Markov head knows
the cycle, but for a share of tokens, drawn at random, whose continuation it has wrong. So drafts are accepted with the
set probability, independently (the chance of the first k is its k-th power), in every regime.

What it shows: the time of every part of a round at the real sizes, layers, caches and heads included, since dense
arithmetic takes the same time for any numbers. What it does not show: how well a trained drafter drafts, nor what
telling good drafts from bad ones is worth. Confidences are the acceptance itself, the same for every draft: calibrated
and of no use for choosing among rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.aot_cases import Model

_SMALL, _FLAT = 1e-3, 1e-3
"""Scale of random weights, and of the drafter's final norm: its base logits must not outweigh the Markov head."""
_MARKOV_LOGIT = 400.0
"""What the Markov head gives the token that it knows."""
MAX_POSITION = 8192


@dataclass(frozen=True)
class Chain:
    """The cycle and what the drafter knows of it."""

    order: Tensor  # [vocab] int64: tokens as they follow each other
    is_known: Tensor  # [vocab] bool, by token: whether the drafter continues it rightly

    @classmethod
    def draw(cls, vocab: int, acceptance: float, seed: int = 0) -> Chain:
        """A random cycle, and exactly that share of known tokens."""
        generator = torch.Generator().manual_seed(seed)
        is_known = torch.zeros(vocab, dtype=torch.bool)
        is_known[torch.randperm(vocab, generator=generator)[: round(acceptance * vocab)]] = True
        return cls(torch.randperm(vocab, generator=generator), is_known)

    @property
    def before(self) -> Tensor:
        """[vocab] int64: the token before each."""
        before = torch.empty_like(self.order)
        before[self.order.roll(-1)] = self.order
        return before

    def text(self, start: int, count: int) -> list[int]:
        """`count` tokens from place `start` of the cycle on."""
        places = (start + torch.arange(count)) % len(self.order)
        return [int(token) for token in self.order[places]]


def write_pair(directory: Path, model: Model, acceptance: float, device: torch.device) -> tuple[Path, Path, Chain]:
    """Writes both checkpoints into `directory`; weights are drawn on `device`, in the model's type."""
    chain = Chain.draw(model.vocab, acceptance)
    target, drafter = directory / "target", directory / "drafter"
    _save(target, _target_config(model), dict(_target(model, chain, device)), model.dtype)
    _save(drafter, _drafter_config(model), dict(_drafter(model, chain, acceptance, device)), model.dtype)
    return target, drafter, chain


def _save(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    directory.mkdir()
    on_host = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(on_host, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _layer(model: Model, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", torch.full((model.hidden,), 1.01)
    yield "post_attention_layernorm.weight", torch.full((model.hidden,), 1.01)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", torch.full((model.head_dim,), 1.01)
    for name, num_out, num_in in (
        ("self_attn.q_proj", model.q_size, model.hidden),
        ("self_attn.k_proj", model.kv_size, model.hidden),
        ("self_attn.v_proj", model.kv_size, model.hidden),
        ("self_attn.o_proj", model.hidden, model.q_size),
        ("mlp.gate_proj", model.intermediate, model.hidden),
        ("mlp.up_proj", model.intermediate, model.hidden),
        ("mlp.down_proj", model.hidden, model.intermediate),
    ):
        yield f"{name}.weight", _SMALL * torch.randn(num_out, num_in, device=device)


def _target(model: Model, chain: Chain, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    embedding = torch.randn(model.vocab, model.hidden, device=device)
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", embedding[chain.before.to(device)]
    yield "model.norm.weight", torch.full((model.hidden,), 1.01)
    for index in range(model.num_layers):
        yield from ((f"model.layers.{index}.{name}", tensor) for name, tensor in _layer(model, device))


def _drafter(model: Model, chain: Chain, acceptance: float, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    yield "fc.weight", _SMALL * torch.randn(model.hidden, model.feature_layers * model.hidden, device=device)
    yield "hidden_norm.weight", torch.full((model.hidden,), 1.01)
    yield "norm.weight", torch.full((model.hidden,), _FLAT)
    for index in range(model.draft_layers):
        yield from ((f"layers.{index}.{name}", tensor) for name, tensor in _layer(model, device))
    rows = torch.nn.functional.normalize(torch.randn(model.vocab, model.markov_rank, device=device), dim=1)
    rows *= math.sqrt(_MARKOV_LOGIT)
    # A token that is not known looks like the one before it on the cycle, so its draft is one place behind.
    seen = torch.where(chain.is_known, torch.arange(model.vocab), chain.before)
    yield "markov_head.markov_w1.weight", rows[seen.to(device)]
    yield "markov_head.markov_w2.weight", rows[chain.before.to(device)]
    yield "confidence_head.proj.weight", torch.zeros(1, model.hidden + model.markov_rank)
    yield "confidence_head.proj.bias", torch.tensor([math.log(acceptance / (1 - acceptance))])


def _decoder_config(model: Model, num_layers: int) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }


def _target_config(model: Model) -> dict[str, Any]:
    own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {**_decoder_config(model, model.num_layers), **own}


def _drafter_config(model: Model) -> dict[str, Any]:
    last = model.num_layers - 2
    layers = [round(last * place / max(1, model.feature_layers - 1)) for place in range(model.feature_layers)]
    return {
        **_decoder_config(model, model.draft_layers),
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": model.block_size,
        "mask_token_id": 0,
        "num_target_layers": model.num_layers,
        "target_layer_ids": layers,
        "markov_rank": model.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
