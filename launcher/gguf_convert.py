"""GGUF (llama architecture, byte-level BPE) to a transformers checkpoint. numpy only; no torch is loaded.

Layout of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Rows of the query and key projections are
stored for interleaved rotary pairs there; transformers rotates halves, so they are reordered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file

from service_kit.errors import ConfigurationError

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPLITS_EVERY_DIGIT = ("smollm",)  # values of tokenizer.ggml.pre we know how to rebuild


class _NamedTensor(NamedTuple):
    """A weight under its transformers name."""

    name: str
    values: npt.NDArray[np.float32]


class GgufModel:
    """Metadata and weights of one GGUF file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError for an architecture other than llama."""
        self._reader = GGUFReader(path)
        if self.field("general.architecture") != "llama":
            raise ConfigurationError(f"{path}: architecture {self.field('general.architecture')!r}, expected 'llama'")

    def field(self, key: str) -> Any:
        """Value of a metadata key. Raises ConfigurationError if it is missing."""
        field = self._reader.get_field(key)
        if field is None:
            raise ConfigurationError(f"GGUF file without metadata {key!r}")
        return field.contents()

    @property
    def num_tensors(self) -> int:
        """Number of weights."""
        return len(self._reader.tensors)

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
            "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            **self.generation_config(),
        }

    def generation_config(self) -> dict[str, Any]:
        """Special token ids, as in `generation_config.json`."""
        return {
            "bos_token_id": int(self.field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self.field("tokenizer.ggml.eos_token_id")),
            "pad_token_id": int(self.field("tokenizer.ggml.padding_token_id")),
        }

    def tensors(self) -> Iterator[_NamedTensor]:
        """Dequantised weights [out, in]. Raises ConfigurationError for a weight that has no place in the model."""
        heads = {
            "attn_q": int(self.field("llama.attention.head_count")),
            "attn_k": int(self.field("llama.attention.head_count_kv")),
        }
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            parts = tensor.name.removesuffix(".weight").split(".")
            if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
                if parts[2] in heads:
                    values = _pairs_to_halves(values, heads[parts[2]])
                yield _NamedTensor(f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight", values)
            elif len(parts) == 1 and parts[0] in _GLOBAL_NAMES:
                yield _NamedTensor(f"{_GLOBAL_NAMES[parts[0]]}.weight", values)
            else:
                raise ConfigurationError(f"GGUF weight {tensor.name!r} is not part of a Llama model")

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
                if kind == TokenType.CONTROL
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


def _pairs_to_halves(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows [head, pair, 2] → [head, 2, pair]: interleaved rotary pairs to rotated halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    halves: npt.NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(rows, columns)
    return halves


def convert(gguf_path: Path, directory: Path, advance: Callable[[], object]) -> None:
    """Writes a float16 transformers checkpoint into `directory`; calls `advance` after each weight."""
    model = GgufModel(gguf_path)
    weights: dict[str, npt.NDArray[np.float16]] = {}
    for tensor in model.tensors():
        weights[tensor.name] = np.ascontiguousarray(tensor.values, np.float16)
        advance()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config.json", model.config()),
        ("generation_config.json", model.generation_config()),
        ("tokenizer.json", model.tokenizer()),
        ("tokenizer_config.json", model.tokenizer_config()),
    ):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
