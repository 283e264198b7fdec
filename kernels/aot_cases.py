"""What `kernels.aot` compiles: for each operation, the calls that a step of a model makes, on tensors without memory.

An operation is added here when it gets a `triton.py`: a function that calls it the ways an engine does, and its line in
CASES. Shapes whose last dimension is not told by the model (rows of a step) do not change the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS, _SLOTS, _PAGES, _MAX_PAGES, _PAGE_SIZE = 64, 16, 512, 128, 16


class Model(NamedTuple):
    """Shapes of a target and its drafter."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_layers: int
    draft_layers: int
    feature_layers: int
    markov_rank: int
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    has_qk_norm: bool = True

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_dim


MODELS = {
    "Qwen3-4B": Model(2560, 9728, 32, 8, 128, 151936, 36, 5, 5, 256, 7),
    "Qwen3-8B": Model(4096, 12288, 32, 8, 128, 151936, 36, 5, 5, 256, 7),
}
HEADS = {
    "Llama-3-8B": Model(4096, 14336, 32, 8, 128, 128256, 32, 5, 5, 256, 7, has_qk_norm=False),
    "Qwen2.5-7B": Model(3584, 18944, 28, 4, 128, 152064, 28, 5, 5, 256, 7, has_qk_norm=False),
    "SmolLM2-135M": Model(576, 1536, 9, 3, 64, 49152, 30, 2, 4, 128, 7, has_qk_norm=False),
    "Qwen3-8B, blocks of 16": Model(4096, 12288, 32, 8, 128, 151936, 36, 5, 5, 256, 16),
    "Qwen3-8B, float32": Model(4096, 12288, 32, 8, 128, 151936, 36, 5, 5, 256, 7, torch.float32),
    "Qwen2.5-7B, float32": Model(3584, 18944, 28, 4, 128, 152064, 28, 5, 5, 256, 7, torch.float32, False),
    "SmolLM2-135M, float32": Model(576, 1536, 9, 3, 64, 49152, 30, 2, 4, 128, 7, torch.float32, False),
}
"""More shapes of attention, whose kernels depend on the heads."""
ATTENTION = "paged_attention", "block_attention"
"""Operations that are compiled for HEADS as well."""


def models_of(operation: str) -> dict[str, Model]:
    """Shapes that an operation is compiled for."""
    return {**MODELS, **HEADS} if operation in ATTENTION else MODELS


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """int32 without memory."""
    return empty(*shape, dtype=torch.int32)


def floats(*shape: int) -> Tensor:
    """float32 without memory."""
    return empty(*shape, dtype=torch.float32)


def _rms_norm(model: Model) -> None:
    ops = import_module("kernels.rms_norm.triton")
    residual, delta, out = (empty(_ROWS, model.hidden) for _ in range(3))
    ops.rms_norm(residual, empty(model.hidden), 1e-6, out)
    ops.add_rms_norm(residual, delta, empty(model.hidden), 1e-6, out)


def _silu_mul(model: Model) -> None:
    ops = import_module("kernels.silu_mul.triton")
    ops.silu_mul(empty(_ROWS, 2 * model.intermediate), empty(_ROWS, model.intermediate))


def _pages(model: Model) -> tuple[Tensor, ...]:
    """cos, sin, keys and values."""
    pages = _PAGES, model.num_kv_heads
    rotary = floats(_MAX_PAGES * _PAGE_SIZE, model.head_dim // 2)
    keys = empty(*pages, model.head_dim, _PAGE_SIZE, dtype=model.dtype)
    return rotary, rotary, keys, empty(*pages, _PAGE_SIZE, model.head_dim, dtype=model.dtype)


def _norm(model: Model) -> Tensor | None:
    """Weights of q and k norms."""
    return empty(model.head_dim, dtype=model.dtype) if model.has_qk_norm else None


def _qkv_and_out(model: Model, rows: int) -> tuple[Tensor, Tensor]:
    width = model.q_size + 2 * model.kv_size
    return empty(rows, width, dtype=model.dtype), empty(rows, model.q_size, dtype=model.dtype)


def _paged_attention(model: Model) -> None:
    ops = import_module("kernels.paged_attention.triton")
    norm, place = _norm(model), (ints(_ROWS), ints(_ROWS), ints(_SLOTS, _MAX_PAGES))
    for rows in (_ROWS, 4 * _ROWS):  # programs share the contexts of few rows
        qkv, out = _qkv_and_out(model, rows)
        table = ints(_SLOTS, _MAX_PAGES)
        ops.paged_attention(qkv, ints(rows), ints(rows), table, *_pages(model), norm, norm, 1e-6, 0, out)
    ops.write_context(empty(_ROWS, 2 * model.kv_size, dtype=model.dtype), *place, *_pages(model), norm, 1e-6)


def _block_attention(model: Model) -> None:
    ops = import_module("kernels.block_attention.triton")
    norm, table = _norm(model), ints(_SLOTS, _MAX_PAGES)
    for blocks in (1, _SLOTS):  # programs share the contexts of few rows
        rows, place = blocks * model.block_size, (ints(blocks), ints(blocks), model.block_size, table)
        qkv, out = _qkv_and_out(model, rows)
        ops.block_attention(qkv, *place, *_pages(model), norm, norm, 1e-6, 0, out)


def _wide(*shape: int) -> Tensor:
    """int64 without memory."""
    return empty(*shape, dtype=torch.int64)


def _doubles(*shape: int) -> Tensor:
    """float64 without memory."""
    return empty(*shape, dtype=torch.float64)


def _sampling_rows() -> tuple[Tensor, ...]:
    """Fields of `kernels.triton.rows.SamplingRows`."""
    slots = _SLOTS
    return ints(slots), floats(slots), ints(slots), _doubles(slots), floats(slots), _wide(slots)


def _target_probs(model: Model) -> None:
    ops, rows = import_module("kernels.target_probs.triton"), import_module("kernels.triton.rows")
    own = rows.SamplingRows(*_sampling_rows())
    ops.target_probs_of(floats(_ROWS, model.vocab), ints(_ROWS), own, _doubles(_ROWS, model.vocab))


def _rejection_sample(model: Model) -> None:
    ops, rows = import_module("kernels.rejection_sample.triton"), import_module("kernels.triton.rows")
    own, block = rows.SamplingRows(*_sampling_rows()), model.block_size
    windows = ops.Windows(ints(_ROWS), ints(_SLOTS), ints(_SLOTS), ints(_SLOTS, block), _wide(_SLOTS), _wide(_SLOTS))
    outcomes = ops.WindowOutcomes(ints(_SLOTS), ints(_SLOTS, block + 1), ints(_SLOTS))
    asks = ops.Asks(ints(_SLOTS, 4), ints(_SLOTS, 4), _doubles(_SLOTS, 4))
    probs = floats(_SLOTS, block, model.vocab)
    for target_to_draft, logits in ((None, empty), (ints(model.vocab), floats)):
        drafts = ops.DraftDistributions(probs, ints(_SLOTS), target_to_draft)
        ops.accept_rows(logits(_ROWS, model.vocab), windows, own, drafts, outcomes, asks)


def _markov_sample(model: Model) -> None:
    ops, rows = import_module("kernels.markov_sample.triton"), import_module("kernels.triton.rows")
    own, kinds = rows.SamplingRows(*_sampling_rows()), import_module("kernels.markov_sample").MarkovKind
    rank, hidden, slots = model.markov_rank, model.hidden, 2  # slots after the first are alike
    blocks = ops.Blocks(ints(_SLOTS, slots), floats(_SLOTS, slots), floats(_SLOTS, slots, model.vocab), ints(_SLOTS))
    confidence = ops.ConfidenceTensors(empty(1, hidden), empty(rank), floats(1))
    for kind, outputs in ((kinds.VANILLA, 0), (kinds.GATED, rank), (kinds.RNN, 3 * rank)):
        weights = (empty(outputs, hidden), empty(outputs, rank), empty(outputs, rank), empty(outputs))
        of_state = weights[2] if kind == kinds.RNN else None
        projection = (weights[0], weights[1], of_state, weights[3]) if outputs else ()
        head = ops.HeadTensors(kind, empty(model.vocab, rank), empty(model.vocab, rank), *projection)
        ops.sample_blocks(
            empty(_SLOTS, slots, model.vocab), empty(_SLOTS, slots, hidden), head, confidence, ints(_SLOTS), own,
            _wide(_SLOTS), _wide(_SLOTS), ints(model.vocab) if kind == kinds.RNN else None, blocks,
        )  # fmt: skip


def _logit_controls(model: Model) -> None:
    ops, block = import_module("kernels.logit_controls.triton"), model.block_size
    controls = ops.ControlSlots.empty(_SLOTS, model.vocab, (16, 8, 4), "meta")
    rows = ints(_ROWS), ints(_SLOTS), ints(_SLOTS), ints(_SLOTS, block)
    ops.control_rows(floats(_ROWS, model.vocab), *rows, controls)
    ops.commit_tokens(ints(_SLOTS), ints(_SLOTS, block + 1), ints(_SLOTS), controls)


def _token_masks(model: Model) -> None:
    ops = import_module("kernels.token_masks.triton")
    place, masks = (ints(_ROWS), ints(_SLOTS)), (ints(_ROWS, model.vocab // 32), ints(_SLOTS))
    changed = floats(_ROWS, model.vocab)
    ops.mask_windows(changed, *place, *masks)
    ops.lift_controls(changed, empty(_ROWS, model.vocab), *place, *masks, ints(_SLOTS))


def _token_scores(model: Model) -> None:
    ops, tokens = import_module("kernels.token_scores.triton"), (_SLOTS, model.block_size + 1)
    scores = ops.Scores(_doubles(*tokens), ints(*tokens), ints(*tokens, 20), _doubles(*tokens, 20))
    windows = ints(_ROWS), ints(_SLOTS), ints(_SLOTS), ints(*tokens), ints(_SLOTS)
    for logits in (empty, floats):
        ops.score_windows(logits(_ROWS, model.vocab), *windows, scores)


def _verify_lens(model: Model) -> None:
    ops = import_module("kernels.verify_lens.triton")
    ops.verify_lens(floats(_SLOTS, model.block_size), ints(_SLOTS), ints(1), ints(_SLOTS))


def _ragged_rows(model: Model) -> None:
    ops, place = import_module("kernels.ragged_rows.triton"), (ints(_SLOTS), ints(_ROWS))
    ops.index_rows(ints(_SLOTS), *place)
    for size, dtype in (((), torch.int32), ((model.hidden,), torch.bfloat16)):
        padded, packed = empty(_SLOTS, model.block_size + 1, *size, dtype=dtype), empty(_ROWS, *size, dtype=dtype)
        ops.pack_rows(padded, *place, packed)
        ops.scatter_rows(packed, *place, padded)


CASES: dict[str, Callable[[Model], None]] = {
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "paged_attention": _paged_attention,
    "block_attention": _block_attention,
    "target_probs": _target_probs,
    "rejection_sample": _rejection_sample,
    "markov_sample": _markov_sample,
    "logit_controls": _logit_controls,
    "token_masks": _token_masks,
    "token_scores": _token_scores,
    "verify_lens": _verify_lens,
    "ragged_rows": _ragged_rows,
}
"""By operation's folder."""
