"""Loading a target's tensors: each one accounted for, by name."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.linear import WeightFormat
from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError
from verifier_service.config import TargetConfig
from verifier_service.weights import TargetWeights, load_weights

GOLDEN = Path(__file__).parents[1] / "golden" / "target"


def load_edited(
    directory: Path, edit: dict[str, torch.Tensor | None], weight_format: WeightFormat = "float32"
) -> TargetWeights:
    """The golden target with tensors added, replaced or (None) removed."""
    shutil.copy(GOLDEN / "config.json", directory)
    tensors = {**load_file(GOLDEN / "model.safetensors"), **edit}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    checkpoint = Checkpoint(str(directory))
    return load_weights(checkpoint, TargetConfig.from_checkpoint(checkpoint), weight_format)


def test_projections_are_packed_in_order(tmp_path: Path) -> None:
    weights = load_edited(tmp_path, {})
    tensors = load_file(GOLDEN / "model.safetensors")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for packed, names in (
        (weights.layers[4].qkv, ("self_attn.q", "self_attn.k", "self_attn.v")),
        (weights.layers[4].gate_up, ("mlp.gate", "mlp.up")),
    ):
        parts = [x @ tensors[f"model.layers.4.{name}_proj.weight"].T for name in names]
        torch.testing.assert_close(packed(x), torch.cat(parts, dim=1))


def test_tied_head_and_old_buffers_are_accepted(tmp_path: Path) -> None:
    extra = {
        "lm_head.weight": torch.zeros(512, 64),
        "model.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    weights = load_edited(tmp_path, extra)
    x = torch.ones(1, 64)
    torch.testing.assert_close(weights.lm_head(x), x @ weights.embedding.T)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"model.layers.3.mlp.up_proj.weight": None}, r"lacks tensors: model\.layers\.3\.mlp\.up_proj\.weight"),
        ({"model.norm.weight": None}, r"lacks tensors: model\.norm\.weight"),
        ({"model.layers.6.input_layernorm.weight": torch.ones(64)}, r"unexpected tensors: model\.layers\.6"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, r"unexpected tensors: .*q_proj\.bias"),
        ({"model.norm.weight": torch.ones(63)}, r"model\.norm\.weight is \[63\], its configuration asks for \[64\]"),
        ({"model.norm.weight": torch.full((64,), torch.nan)}, r"model\.safetensors: tensor model\.norm.* holds NaN"),
        ({"model.embed_tokens.weight": torch.full((512, 64), torch.inf)}, r"model\.embed_tokens.* holds NaN or inf"),
        (
            {"model.layers.2.mlp.up_proj.weight": torch.full((128, 64), -torch.inf).half()},
            r"layers\.2\.mlp\.up.* holds",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, edit: dict[str, torch.Tensor | None], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_edited(tmp_path, edit)


def test_a_target_whose_norms_are_all_one_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [name for name in load_file(GOLDEN / "model.safetensors") if "norm" in name]
    ones = {name: torch.ones(16 if name.endswith(("q_norm.weight", "k_norm.weight")) else 64) for name in names}
    with caplog.at_level(logging.WARNING):
        load_edited(tmp_path, {**ones, "model.norm.weight": torch.full((64,), 1.5)})
    assert "every norm weight" not in caplog.text
    with caplog.at_level(logging.WARNING):
        load_edited(tmp_path, {**ones})
    assert "every norm weight is exactly 1" in caplog.text


def test_a_weight_too_large_for_its_format_is_named(tmp_path: Path) -> None:
    large = {"model.layers.1.mlp.up_proj.weight": torch.full((128, 64), 1e5)}
    load_edited(tmp_path, {**large})
    with pytest.raises(ConfigurationError, match=r"layer 1, mlp\.gate: .*float32"):
        load_edited(tmp_path, {**large}, "fp16")
