"""A random target and a drafter that knows its bigrams: small enough for an interpreter, and drafts are accepted.

What the target says depends most on the last token, as its layers add little to the embedding, and the drafter's Markov
head holds the same table: a good part of what it drafts is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tiny_target import END_OF_TURN, NUM_TOKENS, add_tokenizer
from torch import Tensor

from drafter_service.config import parse_config
from drafter_service.pair import expected_shapes

_HIDDEN = 32
_DECODER = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": NUM_TOKENS,
    "dtype": "float32",
    "eos_token_id": END_OF_TURN,
    "model_type": "qwen3",
}
_NUM_TARGET_LAYERS = 2
BLOCK_SIZE = 3
_DRAFTER = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK_SIZE,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": _HIDDEN,
    "mask_token_id": 500,
    "num_hidden_layers": 1,
    "num_target_layers": _NUM_TARGET_LAYERS,
    "target_layer_ids": [0],
}


class TinyPair(NamedTuple):
    """Directories of two checkpoints."""

    target: Path
    drafter: Path


def make_pair(directory: Path) -> TinyPair:
    """Writes the target, with a tokenizer, and its drafter below `directory`."""
    random = torch.Generator().manual_seed(11)

    def draw(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, generator=random) * scale

    def layer_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Norms around 1, projections small."""
        return {
            name: draw(shape, 0.1) + float("norm" in name)
            for name, shape in shapes.items()
            if name.startswith("layers.0.")
        }

    config = _DECODER | _DRAFTER
    shapes = expected_shapes(parse_config(config))
    embedding, lm_head = draw((NUM_TOKENS, _HIDDEN), 1.0), draw((NUM_TOKENS, _HIDDEN), 0.5)
    target = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": lm_head,
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for index in range(_NUM_TARGET_LAYERS):
        target |= {
            f"model.{name.replace('layers.0.', f'layers.{index}.')}": tensor
            for name, tensor in layer_of(shapes).items()
        }
    drafter = {name: draw(shape, 0.1) for name, shape in shapes.items()} | layer_of(shapes)
    drafter |= {"markov_head.markov_w1.weight": embedding.clone(), "markov_head.markov_w2.weight": lm_head.clone()}

    pair = TinyPair(directory / "tiny-target", directory / "tiny-drafter")
    target_config = _DECODER | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": _NUM_TARGET_LAYERS}
    for path, content, tensors in ((pair.target, target_config, target), (pair.drafter, config, drafter)):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(content))
        save_file(tensors, path / "model.safetensors")
    add_tokenizer(pair.target)
    return pair
