"""Every configuration key that changes the forward is implemented or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError
from verifier_service.config import SamplingDefaults, TargetConfig

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 2,
    "bos_token_id": None,
}


def read(directory: Path, family: str = "llama", generation: dict[str, Any] | None = None, **keys: Any) -> TargetConfig:
    base = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**SMALL).to_dict()
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    (directory / "config.json").write_text(json.dumps({**base, "architectures": [architecture], **keys}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    save_file({"a": torch.ones(1)}, directory / "model.safetensors")
    return TargetConfig.from_checkpoint(Checkpoint(str(directory)))


def test_llama_variants(tmp_path: Path) -> None:
    config = read(tmp_path, attention_bias=True, head_dim=6)
    assert (config.has_attention_bias, config.has_mlp_bias, config.has_qk_norm) == (True, False, False)
    assert (config.head_dim, config.windows, config.max_position) == (6, (0, 0, 0), 2048)


def test_qwen3_windows(tmp_path: Path) -> None:
    assert read(tmp_path, "qwen3", layer_types=None).windows == (0, 0, 0)
    config = read(
        tmp_path, "qwen3", layer_types=None, use_sliding_window=True, sliding_window=5, max_window_layers=1, head_dim=4
    )
    assert (config.windows, config.has_qk_norm) == ((0, 5, 5), True)
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, "qwen3", layer_types=mixed, use_sliding_window=True, sliding_window=4).windows == (4, 0, 4)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("llama", {"model_type": "mistral"}, "model_type 'mistral' is not served: only llama, qwen3"),
        ("llama", {"model_type": None}, "model_type None"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures .*only LlamaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented: only 'silu'"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp 2"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config is set"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved True"),
        ("llama", {"sliding_window": 16}, "sliding_window 16 is not implemented for llama"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads 2"),
        ("llama", {"head_dim": 3}, "head_dim 3 even"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types entry 'sliding_attention'"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, family: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, family, **keys)


@pytest.mark.parametrize(
    ("generation", "ids"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 3}, (3,)), ({"eos_token_id": [4, 5]}, (4, 5))],
)
def test_end_of_sequence_ids(tmp_path: Path, generation: dict[str, Any] | None, ids: tuple[int, ...]) -> None:
    assert read(tmp_path, generation=generation).eos_token_ids == ids


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.7}, SamplingDefaults(temperature=0.0)),
        (
            {"do_sample": False, "repetition_penalty": 1.1},
            SamplingDefaults(temperature=0.0, repetition_penalty=1.1),
        ),
        ({"repetition_penalty": 1.05}, SamplingDefaults(repetition_penalty=1.05)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, SamplingDefaults(temperature=0.6, top_k=20)),
        ({"top_p": 0.9, "min_p": 0.1}, SamplingDefaults(top_p=0.9, min_p=0.1)),
    ],
)
def test_sampling_defaults(tmp_path: Path, generation: dict[str, Any], defaults: SamplingDefaults) -> None:
    assert read(tmp_path, generation=generation).sampling_defaults == defaults


@pytest.mark.parametrize(
    ("generation", "message"), [({"eos_token_id": 11}, "eos_token_id"), ({"top_p": 1.5}, "top_p 1.5")]
)
def test_bad_generation_config_is_refused(tmp_path: Path, generation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, generation=generation)
