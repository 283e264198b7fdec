"""Drafters that cannot be served are refused before any weight is read, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_harness import TARGET, VANILLA_DRAFTER, Tensors, make_checkpoint
from safetensors.numpy import save_file

from drafter_service.config import parse_config
from drafter_service.loading import load_drafter, warm_up
from drafter_service.pair import check_pair, expected_shapes
from drafter_service.settings import DrafterSettings
from service_kit.errors import ConfigurationError

EMBEDDED_DRAFTER = Path(__file__).parents[2] / "models" / "smollm2-135m-dspark"
EMBEDDED: dict[str, Any] = json.loads((EMBEDDED_DRAFTER / "config.json").read_text())
VANILLA: dict[str, Any] = json.loads((VANILLA_DRAFTER / "config.json").read_text())


def test_the_embedded_drafter_is_understood() -> None:
    config = parse_config(EMBEDDED)
    assert not config.has_qk_norm
    assert config.is_vocab_reduced
    assert config.elastic_block_sizes == (3, 5, 7)
    assert [config.block_len_for(n) for n in range(1, 8)] == [3, 3, 3, 5, 5, 7, 7]
    assert config.feature_size == 5 * 576
    shapes = expected_shapes(config)
    assert shapes["markov_head.markov_w1.weight"] == (49152, 64)
    assert shapes["markov_head.markov_w2.weight"] == (8192, 64)


def test_only_the_full_block_is_drafted_without_elastic_sizes() -> None:
    assert parse_config(VANILLA).block_len_for(2) == 7


def test_a_drafter_may_have_neither_head() -> None:
    config = parse_config(VANILLA | {"markov_rank": 0, "enable_confidence_head": False})
    assert config.markov_head_type is None
    assert not {name for name in expected_shapes(config) if "head" in name}


def test_sliding_windows_are_read_by_layer() -> None:
    changes = {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
    }
    assert parse_config(VANILLA | changes).windows == (0, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dspark"}, "is in the speculators format"),
        ({"dspark_block_size": 5}, "is in the DeepSeek-V4 format"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architecture Gemma4DSparkModel is not implemented"),
        ({"target_text_model_type": "gemma4_text"}, "is in the Gemma 4 format"),
        ({"dflash_config": {}}, "is in the SpecForge format"),
        ({"sample_from_anchor": False}, "sample_from_anchor False is not implemented: only True is"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not implemented"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not implemented: one of vanilla, gated, rnn is"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true without a Markov head"),
        ({"block_size": 0}, "block_size must be a positive integer, not 0"),
        ({"block_size": None}, "block_size must be a positive integer, not None"),
        ({"elastic_block_sizes": [3, 9]}, r"elastic_block_sizes \[3, 7, 9\] must lie in 1 ... block_size 7"),
        ({"mask_token_id": 512}, "mask_token_id 512 is outside its vocab_size 512"),
        ({"target_layer_ids": "all"}, "target_layer_ids must be integers, not 'all'"),
        ({"target_layer_ids": [0, 5]}, "target_layer_ids holds 5: with 6 target layers ids run from 0 to 4"),
        ({"target_layer_ids": [-1, 2]}, "target_layer_ids holds -1"),
        ({"draft_vocab_size": 1024}, "draft_vocab_size 1024 exceeds its vocab_size 512"),
        ({"layer_types": ["sliding_attention"] * 2}, "set sliding_window"),
        ({"layer_types": ["chunked_attention"] * 2}, "'chunked_attention'"),
        ({"hidden_size": "wide"}, "config.json is not a Qwen3DSparkModel configuration"),
    ],
)
def test_configurations_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_config(VANILLA | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 600}, "its vocab_size is 600, vocab_size of .* is 512"),
        ({"hidden_size": 96}, "its hidden_size is 96, hidden_size of .* is 64"),
        ({"num_target_layers": 8}, "its num_target_layers is 8, num_hidden_layers of .* is 6"),
        ({"target_layer_ids": [0, 2]}, r"fc.weight is \[64, 192\], .* asks for \[64, 128\]"),
        (
            {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
            "has unexpected tensors: layers.1.input_layernorm",
        ),
        ({"draft_vocab_size": 128}, "lacks tensors: d2t"),
        ({"markov_head_type": "gated"}, "lacks tensors: markov_head.gate_proj.bias, markov_head.gate_proj.weight"),
        ({"attention_bias": True}, "lacks tensors: layers.0.self_attn.k_proj.bias"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_with_both_numbers(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    drafter = make_checkpoint(tmp_path / "drafter", changes)
    with pytest.raises(ConfigurationError, match=message):
        check_pair(drafter, TARGET)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors["hidden_norm.weight"]

    drafter = make_checkpoint(tmp_path / "drafter", {}, remove)
    with pytest.raises(ConfigurationError, match=r"lacks tensors: hidden_norm\.weight"):
        check_pair(drafter, TARGET)


def test_a_corrupt_file_is_named(tmp_path: Path) -> None:
    drafter = make_checkpoint(tmp_path / "drafter", {})
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is corrupt or incomplete"):
        check_pair(drafter, TARGET)


def test_a_target_without_the_embedding_is_refused(tmp_path: Path) -> None:
    def drop_copies(tensors: Tensors) -> None:
        del tensors["embed_tokens.weight"], tensors["lm_head.weight"]

    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text((TARGET / "config.json").read_text())
    save_file({"model.norm.weight": np.ones(64, np.float32)}, target / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"model\.embed_tokens\.weight is missing"):
        check_pair(make_checkpoint(tmp_path / "drafter", {}, drop_copies), target)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.full(128, 400), "target ids 400 ... 527 with 0 repeats"),
        (-np.arange(128), "target ids 0 ... 0 with 127 repeats"),
    ],
)
def test_a_draft_vocabulary_outside_the_targets_is_refused(tmp_path: Path, offsets: np.ndarray, message: str) -> None:
    def reduce(tensors: Tensors) -> None:
        tensors["d2t"] = offsets
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][:128].copy()

    drafter = make_checkpoint(tmp_path / "drafter", {"draft_vocab_size": 128}, reduce)
    settings = DrafterSettings(model=str(drafter), target=str(TARGET))
    with pytest.raises(ConfigurationError, match=message):
        load_drafter(settings)


@pytest.mark.parametrize(
    "name", ["fc.weight", "norm.weight", "markov_head.markov_w1.weight", "layers.0.mlp.down_proj.weight"]
)
def test_not_a_number_in_a_weight_is_refused(tmp_path: Path, name: str) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[name].flat[-1] = np.nan

    settings = DrafterSettings(model=str(make_checkpoint(tmp_path / "drafter", {}, poison)), target=str(TARGET))
    with pytest.raises(ConfigurationError, match=rf"model\.safetensors: tensor {name} holds NaN"):
        load_drafter(settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc.weight", r"drafter: fc: a weight is not .* in fp16: use weight format float32"),
        ("embed_tokens.weight", r"embed_tokens\.weight is too large for float16: use weight format float32"),
        ("lm_head.weight", r"lm_head: a weight is not .* in fp16"),
    ],
)
def test_a_weight_too_large_for_its_format_is_named(tmp_path: Path, name: str, message: str) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors[name].flat[-1] = 1e6

    drafter = str(make_checkpoint(tmp_path / "drafter", {}, enlarge))
    load_drafter(DrafterSettings(model=drafter, target=str(TARGET), weight_format="float32"))
    with pytest.raises(ConfigurationError, match=message):
        load_drafter(DrafterSettings(model=drafter, target=str(TARGET), weight_format="fp16"))


def test_heads_that_the_compiled_kernels_cannot_run_are_refused_or_run_slowly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def narrow(tensors: Tensors) -> None:
        for name in [name for name in tensors if "self_attn" in name]:
            axis = 1 if "o_proj" in name else 0
            tensors[name] = np.ascontiguousarray(np.split(tensors[name], 2, axis)[0])

    drafter = make_checkpoint(tmp_path / "drafter", {"head_dim": 8}, narrow)
    with pytest.raises(ConfigurationError, match="multiple of 16, not 8: set kernels to reference"):
        load_drafter(DrafterSettings(model=str(drafter), target=str(TARGET), kernels="cpu"))
    loaded = load_drafter(DrafterSettings(model=str(drafter), target=str(TARGET)))
    assert "using the slow reference kernels" in caplog.text
    warm_up(loaded)
