"""Weight format q4: the levels of the .gguf file beside the tensors, packed as they are."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tiny_gguf import ALL_QUANTISED, write_gguf

from kernels.linear import Linear
from kernels.linear.reference import round_rows
from launcher.embedded import embedded_dir
from launcher.gguf_convert import convert
from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError
from service_kit.gguf_file import GgufFile
from service_kit.gguf_llama import LlamaGguf
from service_kit.settings import default_cache_dir
from verifier_service.config import TargetConfig
from verifier_service.loading import load_target
from verifier_service.model import TokenRows
from verifier_service.settings import VerifierSettings
from verifier_service.weights import WeightFormat, load_weights


def make_target(directory: Path, kinds: Mapping[str, Kind] = ALL_QUANTISED) -> Path:
    """A converted target with its .gguf file beside it."""
    write_gguf(directory / "tiny.gguf", kinds=kinds)
    convert(directory / "tiny.gguf", directory, lambda: None)
    return directory


def linears_of(model: Path, weight_format: WeightFormat) -> list[Linear]:
    checkpoint = Checkpoint(str(model))
    return list(load_weights(checkpoint, TargetConfig.from_checkpoint(checkpoint), weight_format).linears)


def logits_of(model: Path, weight_format: str) -> torch.Tensor:
    settings = VerifierSettings(model=str(model), weight_format=weight_format, kernels="reference", threads=1)
    target = load_target(settings).model
    space = target.workspace(4, 64, 64)
    ids = torch.tensor([1, 2, 4, 3, 1, 1, 0, 2] * 4)
    rows = TokenRows(ids, torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))
    return target.logits(target.forward(rows, torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), space))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as layers over levels see them."""
    integers, scales = round_rows(x)
    return (integers * scales[..., None]).view(x.shape)


def test_layers_are_those_of_the_dequantised_weights(tmp_path: Path) -> None:
    model = make_target(tmp_path)
    exact = tmp_path / "exact"
    exact.mkdir()
    shutil.copy(model / "config.json", exact)
    gguf = LlamaGguf(GgufFile(model / "tiny.gguf"))
    # The embedding's rows and the norms come from the converted tensors, in float16, as in every format.
    converted = load_file(model / "model.safetensors")
    tensors = {
        name: torch.from_numpy(gguf.floats(name)) if "proj" in name else converted[name].float() for name in gguf.names
    }
    tensors["lm_head.weight"] = torch.from_numpy(gguf.floats("model.embed_tokens.weight"))
    save_file(tensors, exact / "model.safetensors")
    config = (exact / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (exact / "config.json").write_text(config)
    for expected, actual in zip(linears_of(exact, "float32"), linears_of(model, "q4"), strict=True):
        x = torch.randn(3, actual.num_in)
        torch.testing.assert_close(actual(x), expected(rounded(x).float()), rtol=1e-4, atol=1e-4)
    assert logits_of(model, "q4").isfinite().all()


def test_a_file_that_is_missing_or_ambiguous_is_named(tmp_path: Path) -> None:
    model = make_target(tmp_path)
    shutil.copy(model / "tiny.gguf", model / "second.gguf")
    with pytest.raises(ConfigurationError, match=r"found 2: .*use weight format fp16"):
        logits_of(model, "q4")
    for path in model.glob("*.gguf"):
        path.unlink()
    with pytest.raises(ConfigurationError, match="found 0: put the model's Q4_1 file there, or"):
        logits_of(model, "q4")
    logits_of(model, "fp16")


def test_levels_of_another_model_are_refused(tmp_path: Path) -> None:
    model = make_target(tmp_path)
    write_gguf(model / "tiny.gguf", kinds=ALL_QUANTISED, seed=1)
    with pytest.raises(ConfigurationError, match=r"q_proj\.weight does not fit the tensors beside it"):
        logits_of(model, "q4")


def test_levels_of_weights_not_yet_quantised_are_accepted(tmp_path: Path) -> None:
    model = make_target(tmp_path, kinds={})
    write_gguf(model / "tiny.gguf", kinds=ALL_QUANTISED)
    logits_of(model, "q4")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({}, r"q_proj\.weight is not stored there as Q4_1 or Q8_0: use weight format fp16"),
        ({**ALL_QUANTISED, "blk.0.ffn_up.weight": Kind.Q8_0}, r"gate_proj\.weight is stored unlike"),
        ({**ALL_QUANTISED, "blk.0.attn_v.weight": Kind.F32}, r"v_proj\.weight is not stored there as Q4_1 or Q8_0"),
    ],
)
def test_other_ways_of_storing_are_refused(tmp_path: Path, kinds: dict[str, Kind], message: str) -> None:
    model = make_target(tmp_path)
    write_gguf(model / "tiny.gguf", kinds={name: kind for name, kind in kinds.items() if kind != Kind.F32})
    with pytest.raises(ConfigurationError, match=message):
        logits_of(model, "q4")


@pytest.mark.model
def test_embedded_target() -> None:
    """Every linear layer of layer 7, and lm_head, against float64 products of the file's weights."""
    checkpoint = Checkpoint(str(embedded_dir(default_cache_dir())))
    weights = load_weights(checkpoint, TargetConfig.from_checkpoint(checkpoint), "q4")
    gguf = LlamaGguf(GgufFile(next(checkpoint.directory.glob("*.gguf"))))
    layer = weights.layers[7]
    generator = torch.Generator().manual_seed(0)
    for linear, names in (
        (layer.qkv, ("self_attn.q", "self_attn.k", "self_attn.v")),
        (layer.output, ("self_attn.o",)),
        (layer.gate_up, ("mlp.gate", "mlp.up")),
        (layer.down, ("mlp.down",)),
        (weights.lm_head, ()),
    ):
        stored = [f"model.layers.7.{name}_proj.weight" for name in names] or ["model.embed_tokens.weight"]
        weight = torch.cat([torch.from_numpy(gguf.floats(name)) for name in stored]).double()
        x = torch.randn(3, weight.shape[1], generator=generator)
        torch.testing.assert_close(linear(x), (rounded(x) @ weight.T).float(), rtol=1e-5, atol=1e-5)
    assert sum(linear.weight_bytes for linear in weights.linears) < 100e6


def test_auto_takes_the_levels_where_they_fit_and_float16_elsewhere(tmp_path: Path) -> None:
    model = make_target(tmp_path)

    def chosen() -> str:
        return load_target(VerifierSettings(model=str(model), kernels="reference", threads=1)).weight_format

    assert chosen() == "q4"
    (model / "second.gguf").write_bytes(b"not a GGUF file")
    assert chosen() == "fp16"
    for path in model.glob("*.gguf"):
        path.unlink()
    assert chosen() == "fp16"


@pytest.mark.parametrize("name", ["blk.0.ffn_down.weight", "token_embd.weight"])
def test_a_damaged_scale_is_named(tmp_path: Path, name: str) -> None:
    model = make_target(tmp_path)
    path = next(model.glob("*.gguf"))
    content = bytearray(path.read_bytes())
    offset = GgufFile(path).tensors[name].offset
    content[offset : offset + 2] = b"\x00\x7e"  # float16 NaN
    path.write_bytes(content)
    tensor = {"blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight"}.get(name, "model.embed_tokens.weight")
    with pytest.raises(ConfigurationError, match=f"{path.name}: {tensor} has a scale that is NaN or infinite"):
        logits_of(model, "q4")
