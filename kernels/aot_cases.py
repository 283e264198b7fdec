"""What `kernels.aot` compiles: for each operation, the calls that a step of a model makes, on tensors without memory.

An operation is added here when it gets a `triton.py`: a function that calls it the ways an engine does, and its line in
CASES. Shapes whose last dimension is not told by the model (rows of a step) do not change the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
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
    keys, values = empty(*pages, model.head_dim, _PAGE_SIZE), empty(*pages, _PAGE_SIZE, model.head_dim)
    return rotary, rotary, keys, values


def _paged_attention(model: Model) -> None:
    ops = import_module("kernels.paged_attention.triton")
    norm, place = empty(model.head_dim), (ints(_ROWS), ints(_ROWS), ints(_SLOTS, _MAX_PAGES))
    qkv, out = empty(_ROWS, model.q_size + 2 * model.kv_size), empty(_ROWS, model.q_size)
    for window in (0, 1024):
        ops.paged_attention(qkv, *place, *_pages(model), norm, norm, 1e-6, window, out)
    ops.write_context(empty(_ROWS, 2 * model.kv_size), *place, *_pages(model), norm, 1e-6)


def _block_attention(model: Model) -> None:
    ops = import_module("kernels.block_attention.triton")
    norm, place = empty(model.head_dim), (ints(_SLOTS), ints(_SLOTS), model.block_size, ints(_SLOTS, _MAX_PAGES))
    rows = _SLOTS * model.block_size
    qkv, out = empty(rows, model.q_size + 2 * model.kv_size), empty(rows, model.q_size)
    for window in (0, 1024):
        ops.block_attention(qkv, *place, *_pages(model), norm, norm, 1e-6, window, out)


CASES: dict[str, Callable[[Model], None]] = {
    folder: case
    for folder, case in {
        "rms_norm": _rms_norm,
        "silu_mul": _silu_mul,
        "paged_attention": _paged_attention,
        "block_attention": _block_attention,
    }.items()
    if find_spec(f"kernels.{folder}.triton")
}
"""By operation's folder."""
