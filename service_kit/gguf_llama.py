"""Weights of a Llama model in a GGUF file, under their transformers names and in transformers' order.

Rows of the query and key projections are stored for interleaved rotary pairs there; transformers rotates halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from service_kit.errors import ConfigurationError
from service_kit.gguf_file import GgufFile, Levels

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
_ROTARY_HEADS = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


class LlamaGguf:
    """Metadata and weights of one GGUF file of a Llama model."""

    def __init__(self, file: GgufFile) -> None:
        """Raises ConfigurationError for another architecture, or a weight that has no place in the model."""
        self._file = file
        if self.field("general.architecture") != "llama":
            raise ConfigurationError(
                f"{file.path}: architecture {self.field('general.architecture')!r}, expected 'llama'", field="model"
            )
        self._stored_names = {_transformers_name(stored): stored for stored in file.tensors}
        self.names = tuple(self._stored_names)
        """transformers' names of the weights."""

    def field(self, key: str) -> Any:
        """Value of a metadata key. Raises ConfigurationError if it is missing."""
        if key not in self._file.metadata:
            raise ConfigurationError(f"{self._file.path}: GGUF file without metadata {key!r}", field="model")
        return self._file.metadata[key]

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A weight [out, in] as float32, dequantised if it is quantised."""
        values, rows = self._file.floats(self._stored_names[name]), self._row_order(name)
        return values if rows is None else values[rows]

    def levels(self, name: str) -> Levels | None:
        """A quantised weight as stored; None for one of floats."""
        levels, rows = self._file.levels(self._stored_names[name]), self._row_order(name)
        return levels if levels is None or rows is None else levels.of_rows(rows)

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Stored rows [head, pair, 2] in the order [head, 2, pair]; None if they are in order."""
        stored = self._stored_names[name]
        key = _ROTARY_HEADS.get(stored.split(".")[-2])
        if key is None:
            return None
        num_rows, num_heads = self._file.tensors[stored].shape[0], int(self.field(key))
        pairs = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
        order: npt.NDArray[np.intp] = pairs.swapaxes(1, 2).reshape(-1)
        return order


def _transformers_name(stored: str) -> str:
    parts = stored.removesuffix(".weight").split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    if len(parts) == 1 and parts[0] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[parts[0]]}.weight"
    raise ConfigurationError(f"GGUF weight {stored!r} is not part of a Llama model", field="model")
