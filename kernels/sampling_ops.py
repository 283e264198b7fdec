"""Chooses one implementation of every sampling operation, as `kernels.registry` does for those of a forward pass.

These take and give plain arrays, one call as an engine on the host makes it. A step that stays on a device calls the
batched forms beside them (`accept_rows`, `sample_blocks`, `mask_windows` and others of each `triton.py`), which launch
the same kernels for many rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.markov_sample import BlockDraft
from kernels.registry import Implementation
from kernels.rejection_sample import RowOutcome
from kernels.sampling import SlotSampling
from kernels.token_scores import TokenScore


class SamplingOps(NamedTuple):
    """Operations on logits. Signatures and meanings are those of each `reference.py`."""

    accept_row: Callable[..., RowOutcome]
    """(logits, draft_ids, draft_probs, draft_to_target, sampling, position, round_, asked)"""
    sample_block: Callable[..., BlockDraft]
    """(base_logits, hidden, head, confidence, anchor_ids, sampling, positions, rounds, draft_to_target,
    draft_probs_out)"""
    target_probs: Callable[[npt.NDArray[np.float32], SlotSampling], npt.NDArray[np.float64]]
    """(logits, sampling)"""
    mask_logits: Callable[[npt.NDArray[np.float32], npt.NDArray[np.uint32]], None]
    """(logits, masks)"""
    token_score: Callable[[npt.NDArray[np.float32], int, int], TokenScore]
    """(logits, token_id, num_top)"""
    verify_lens: Callable[..., None]
    """(survivals, limits, budget, lens), tensors all"""


_FOLDERS = {
    "accept_row": "rejection_sample",
    "sample_block": "markov_sample",
    "target_probs": "target_probs",
    "mask_logits": "token_masks",
    "token_score": "token_scores",
    "verify_lens": "verify_lens",
}


def load_sampling_ops(implementation: Implementation) -> SamplingOps:
    """Operations of one implementation: "reference", "cpu" (also "auto"), or "triton", whose arrays are on the host
    too and whose kernels therefore run in Triton's interpreter."""
    kind = "cpu" if implementation == "auto" else implementation
    modules = {name: import_module(f"kernels.{folder}.{kind}") for name, folder in _FOLDERS.items()}
    return SamplingOps(**{name: getattr(module, name) for name, module in modules.items()})
