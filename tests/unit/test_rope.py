"""Rotary tables against the classes of transformers that define them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from service_kit.errors import ConfigurationError
from service_kit.rope import rope_tables


def make_config(rope_parameters: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope_parameters
    )


@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "default", "rope_theta": 100_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda parameters: str(parameters["rope_type"]),
)
def test_tables_equal_the_model_classes(rope_parameters: dict[str, object]) -> None:
    config = make_config(rope_parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(256)[None])
    tables = rope_tables(config, 256)
    for half in (slice(0, 8), slice(8, 16)):
        torch.testing.assert_close(tables.cos, cos[0, :, half], rtol=0, atol=0)
        torch.testing.assert_close(tables.sin, sin[0, :, half], rtol=0, atol=0)


def test_types_that_change_with_length_are_refused_by_name() -> None:
    config = make_config({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0})
    with pytest.raises(ConfigurationError, match="rope_type 'dynamic' is not implemented"):
        rope_tables(config, 8)


def test_partial_rotation_is_refused_by_name() -> None:
    config = make_config({"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5})
    with pytest.raises(ConfigurationError, match="partial_rotary_factor"):
        rope_tables(config, 8)
