"""Loading safetensors checkpoints: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from service_kit.checkpoint import Checkpoint, resolve_directory
from service_kit.errors import ConfigurationError


def _write(directory: Path, tensors: dict[str, torch.Tensor], filename: str = "model.safetensors") -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, directory / filename)


def test_single_file_is_read_as_float32(tmp_path: Path) -> None:
    values = torch.arange(6).reshape(2, 3).to(torch.bfloat16)
    _write(tmp_path, {"a": values, "ids": torch.tensor([3, 1])})
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.shapes == {"a": (2, 3), "ids": (2,)}
    assert torch.equal(checkpoint.read("a", (2, 3)), values.float())
    assert checkpoint.read("ids", (2,), "int").tolist() == [3, 1]


def test_shards_are_joined_and_checked(tmp_path: Path) -> None:
    _write(tmp_path, {"a": torch.ones(2)}, "model-1.safetensors")
    _write(tmp_path, {"b": torch.zeros(3)}, "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.read("b", (3,)).tolist() == [0, 0, 0]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"model-2\.safetensors, which is not there"):
        Checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model-1.safetensors"}}')
    with pytest.raises(ConfigurationError, match="not there"):
        Checkpoint(str(tmp_path))


def test_fingerprint_follows_config_and_headers(tmp_path: Path) -> None:
    prints = set()
    for index, (size, config) in enumerate([(2, "{}"), (3, "{}"), (3, '{"a": 1}')]):
        directory = tmp_path / str(index)
        _write(directory, {"a": torch.ones(size)})
        (directory / "config.json").write_text(config)
        prints.add(Checkpoint(str(directory)).fingerprint)
    assert len(prints) == 3


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    _write(tmp_path, {"a": torch.ones(1), "extra": torch.ones(1)})
    checkpoint = Checkpoint(str(tmp_path))
    checkpoint.require_names(["a"], ignored=re.compile("ext.*"))
    with pytest.raises(ConfigurationError, match="lacks tensors: b"):
        checkpoint.require_names(["a", "b", "extra"])
    with pytest.raises(ConfigurationError, match="unexpected tensors: extra"):
        checkpoint.require_names(["a"])


@pytest.mark.parametrize(
    ("tensor", "shape", "message"),
    [
        (torch.ones(2), (3,), r"tensor a is \[2\], its configuration asks for \[3\]"),
        (torch.tensor([1.0, float("nan")]), (2,), "NaN"),
        (torch.tensor([1.0, float("-inf")]), (2,), "infinity"),
        (torch.ones(2, dtype=torch.int8), (2,), "tensor a is I8"),
    ],
)
def test_bad_tensors_are_refused(tmp_path: Path, tensor: torch.Tensor, shape: tuple[int, ...], message: str) -> None:
    _write(tmp_path, {"a": tensor})
    with pytest.raises(ConfigurationError, match=message):
        Checkpoint(str(tmp_path)).read("a", shape)


def test_pickled_missing_and_corrupt_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        Checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors"):
        Checkpoint(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="pickled"):
        Checkpoint(str(tmp_path))
    _write(tmp_path, {"a": torch.ones(100)})
    whole = (tmp_path / "model.safetensors").read_bytes()
    for cut in (4, 20, len(whole) - 8):
        (tmp_path / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(ConfigurationError, match=r"complete|corrupt"):
            Checkpoint(str(tmp_path))


def test_a_path_that_does_not_exist_is_not_sent_to_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a directory"):
        resolve_directory(str(tmp_path / "nowhere"))
