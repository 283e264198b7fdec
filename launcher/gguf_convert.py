"""GGUF (llama architecture, byte-level BPE) to a transformers checkpoint. numpy only; no torch is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from service_kit.errors import ConfigurationError
from service_kit.gguf_file import GgufFile
from service_kit.gguf_llama import LlamaGguf

_CONTROL = 3  # kind of special tokens in tokenizer.ggml.token_type
_SPLITS_EVERY_DIGIT = ("smollm",)  # values of tokenizer.ggml.pre we know how to rebuild


class GgufModel:
    """Metadata of one GGUF file, as the files of a transformers checkpoint."""

    def __init__(self, weights: LlamaGguf) -> None:
        self._weights, self.field = weights, weights.field

    def config(self) -> dict[str, Any]:
        """transformers' `config.json` of the model."""
        num_heads = int(self.field("llama.attention.head_count"))
        hidden_size = int(self.field("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float16",
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "hidden_size": hidden_size,
            "intermediate_size": int(self.field("llama.feed_forward_length")),
            "num_hidden_layers": int(self.field("llama.block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self.field("llama.attention.head_count_kv")),
            "head_dim": hidden_size // num_heads,
            "hidden_act": "silu",
            "max_position_embeddings": int(self.field("llama.context_length")),
            # float32 in the file; six digits give back the authors' decimal number
            "rms_norm_eps": float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(self.field("llama.rope.freq_base"))},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "lm_head.weight" not in self._weights.names,
            **self.generation_config(),
        }

    def generation_config(self) -> dict[str, Any]:
        """Special token ids, as in `generation_config.json`."""
        return {
            "bos_token_id": int(self.field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self.field("tokenizer.ggml.eos_token_id")),
            "pad_token_id": int(self.field("tokenizer.ggml.padding_token_id")),
        }

    def tokenizer(self) -> dict[str, Any]:
        """Content of `tokenizer.json` (byte-level BPE, every digit its own token)."""
        if self.field("tokenizer.ggml.model") != "gpt2" or self.field("tokenizer.ggml.pre") not in _SPLITS_EVERY_DIGIT:
            raise ConfigurationError(f"GGUF tokenizer {self.field('tokenizer.ggml.pre')!r} is not supported")
        tokens = self.field("tokenizer.ggml.tokens")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": index, "content": tokens[index], **flags}
                for index, kind in enumerate(self.field("tokenizer.ggml.token_type"))
                if kind == _CONTROL
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in self.field("tokenizer.ggml.merges")],
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """Content of `tokenizer_config.json`, with the chat template."""
        tokens = self.field("tokenizer.ggml.tokens")
        names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(self.field("llama.context_length")),
            "chat_template": self.field("tokenizer.chat_template"),
            **{name: tokens[self.field(f"tokenizer.ggml.{key}_token_id")] for name, key in names.items()},
        }


def convert(gguf_path: Path, directory: Path, advance: Callable[[], object]) -> None:
    """Writes a float16 transformers checkpoint into `directory`; calls `advance` after each weight."""
    stored = LlamaGguf(GgufFile(gguf_path))
    model = GgufModel(stored)
    weights: dict[str, npt.NDArray[np.float16]] = {}
    for name in stored.names:
        weights[name] = np.ascontiguousarray(stored.floats(name), np.float16)
        advance()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config.json", model.config()),
        ("generation_config.json", model.generation_config()),
        ("tokenizer.json", model.tokenizer()),
        ("tokenizer_config.json", model.tokenizer_config()),
    ):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
