"""From settings to a target: kernels and formats that fit it, and what is said where they do not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kernels.paged_attention import cpu, reference
from service_kit.errors import ConfigurationError
from service_kit.settings import load_settings
from verifier_service.loading import load_target
from verifier_service.model import TokenRows, page_bytes
from verifier_service.settings import VerifierSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "target"


def save_narrow(directory: Path) -> Path:
    """A target whose heads are 8 wide."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_compiled_kernels_and_packed_weights_stay_close_to_the_reference() -> None:
    logits = []
    for kernels, weight_format in (("reference", "float32"), ("cpu", "float32"), ("cpu", "auto")):
        settings = VerifierSettings(model=str(GOLDEN), kernels=kernels, weight_format=weight_format)
        target = load_target(settings)
        expected = {"reference": reference, "cpu": cpu}[kernels].paged_attention
        assert target.model._ops.paged_attention is expected
        model = target.model
        space = model.workspace(4, 64, 64)
        rows = TokenRows(
            torch.arange(40) * 7 % 512, torch.arange(40, dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
        )
        page_table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)
        logits.append(model.logits(model.forward(rows, page_table, space)))
    scale = logits[0].abs().max()
    assert (logits[1] - logits[0]).abs().max() < 1e-4 * scale
    assert (logits[2] - logits[0]).abs().max() < 2e-2 * scale


@pytest.mark.parametrize(
    ("weight_format", "kernels", "dtype"),
    [("float32", "cpu", torch.float32), ("fp16", "cpu", torch.float16), ("fp16", "reference", torch.float16)],
)
def test_pages_are_float16_beside_weights_of_16_bits(weight_format: str, kernels: str, dtype: torch.dtype) -> None:
    """And then a budget holds twice the positions."""
    settings = VerifierSettings.model_validate(
        {"model": str(GOLDEN), "weight_format": weight_format, "kernels": kernels}
    )
    model = load_target(settings).model
    space = model.workspace(3, 48, 4)
    assert {tensor.dtype for tensor in (*space.keys, *space.values)} == {dtype}
    assert sum(tensor.nbytes for tensor in (*space.keys, *space.values)) == 3 * model.page_bytes
    narrow_bytes = page_bytes(model.config, torch.float16)
    assert page_bytes(model.config, torch.float32) == 2 * narrow_bytes
    assert 2**20 // model.page_bytes == 2**20 // narrow_bytes // (2 if dtype is torch.float32 else 1)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (*space.keys, *space.values))


def test_heads_that_do_not_fill_the_lanes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = str(save_narrow(tmp_path))
    with caplog.at_level(logging.WARNING):
        target = load_target(VerifierSettings(model=model))
    assert target.model._ops.paged_attention is reference.paged_attention
    assert "head_dim 8 is not a multiple of 16" in caplog.text
    with pytest.raises(ConfigurationError, match="set kernels to reference"):
        load_target(VerifierSettings(model=model, kernels="cpu"))


def test_settings_name_the_variable_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="DSPARK_VERIFIER_MODEL"):
        load_settings(VerifierSettings)
    monkeypatch.setenv("DSPARK_VERIFIER_WEIGHT_FORMAT", "int3")
    with pytest.raises(ConfigurationError, match="DSPARK_VERIFIER_WEIGHT_FORMAT"):
        load_settings(VerifierSettings, model="x")
