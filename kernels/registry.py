"""Chooses one implementation of every operation. Signatures and meanings are those of each `reference.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Literal, NamedTuple

from torch import Tensor

logger = logging.getLogger(__name__)

Implementation = Literal["auto", "cpu", "reference", "triton"]


class Ops(NamedTuple):
    """The operations of a forward pass between its linear layers. Each writes into tensors that the caller gives."""

    rms_norm: Callable[[Tensor, Tensor, float, Tensor], None]
    """(x, weight, eps, out)"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, Tensor], None]
    """(residual, delta, weight, eps, out)"""
    silu_mul: Callable[[Tensor, Tensor], None]
    """(gate_up, out)"""
    paged_attention: Callable[..., None]
    """(qkv, positions, row_slots, page_table, cos, sin, keys, values, q_norm, k_norm, eps, window, out)"""
    write_context: Callable[..., None]
    """(kv, positions, row_slots, page_table, cos, sin, keys, values, k_norm, eps)"""
    block_attention: Callable[..., None]
    """(qkv, anchor_positions, row_slots, block_len, page_table, cos, sin, keys, values, q_norm, k_norm, eps, window,
    out)"""
    is_compiled: bool = False
    """Whether all of them are compiled kernels, which `kernels.cpu.program` can record."""


_FOLDERS = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "silu_mul": "silu_mul",
    "paged_attention": "paged_attention",
    "write_context": "paged_attention",
    "block_attention": "block_attention",
}


def use_threads(count: int, spin_us: int = 200) -> None:
    """Runs the compiled kernels on `count` threads, and torch's own operations on the thread that calls them.

    The kernels' helpers look for more work for `spin_us` before they sleep. torch gets none, as two pools would take
    the cores from each other. Call it on the thread that runs the engine: torch's count belongs to the calling thread.
    """
    import torch

    from kernels.cpu.native import set_num_threads
    from kernels.cpu.pool import pool_of

    set_num_threads(count)
    if count > 1:
        pool_of(count - 1).spin(spin_us)
    torch.set_num_threads(1)


def fit_head_dim(implementation: Implementation, head_dim: int) -> Implementation:
    """The implementation that serves heads of this size: "auto" turns to the reference where the compiled one cannot.

    Raises ValueError, in words, if "cpu" is asked for and cannot.
    """
    from kernels.cpu.simd import LANES

    if implementation in ("reference", "triton") or head_dim % LANES == 0:
        return implementation
    if implementation == "cpu":
        raise ValueError(
            f"the compiled kernels need a head_dim that is a multiple of {LANES}, not {head_dim}: set kernels to "
            "reference"
        )
    logger.warning("head_dim %d is not a multiple of %d: using the slow reference kernels", head_dim, LANES)
    return "reference"


def load_ops(implementation: Implementation) -> Ops:
    """Operations of one implementation: "cpu" compiled and row-exact, "reference" plain torch on any device.

    "triton" runs on a GPU, or anywhere in Triton's interpreter; it takes float32, float16 and bfloat16 and leaves out
    rows whose slot is negative. "auto" takes the fastest one that this machine can run without a GPU. Compiling for the
    CPU takes seconds the first time and is cached where NUMBA_CACHE_DIR says.
    """
    kind = "cpu" if implementation == "auto" else implementation
    modules = {folder: import_module(f"kernels.{folder}.{kind}") for folder in _FOLDERS.values()}
    if kind == "cpu":
        from kernels.cpu.native import Kernel

        for kernel in (value for module in modules.values() for value in vars(module).values()):
            if isinstance(kernel, Kernel):
                kernel.compile()
    functions = {name: getattr(modules[folder], name) for name, folder in _FOLDERS.items()}
    return Ops(**functions, is_compiled=kind == "cpu")
