"""A one-layer Llama model as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 4, 2, 8, 64
_TOKENS = ["<|end|>", "a", "b", "Ġ", "ab"]
_SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (len(_TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}
_MATRICES = [name for name, shape in _SHAPES.items() if len(shape) == 2]
ONE_QUANTISED = {"blk.0.ffn_up.weight": Kind.Q8_0}
ALL_QUANTISED = {**dict.fromkeys(_MATRICES, Kind.Q4_1), "token_embd.weight": Kind.Q8_0}
"""As the embedded target: 8 bits for the embedding, 4 for the others."""


def write_gguf(
    path: Path, *, extra: str | None = None, kinds: Mapping[str, Kind] = ONE_QUANTISED, seed: int = 0
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights, stored in float32 unless `kinds` says otherwise; returns them as stored."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * 4])
    writer.add_token_merges(["a b"])
    for name in ("bos", "eos", "pad", "unk"):
        getattr(writer, f"add_{name}_token_id")(0)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {**_SHAPES, **({extra: (HIDDEN,)} if extra else {})}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, values in weights.items():
        if name in kinds:
            packed = gguf.quantize(values, kinds[name])
            weights[name] = gguf.dequantize(packed, kinds[name])
            writer.add_tensor(name, packed, raw_dtype=kinds[name])
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
