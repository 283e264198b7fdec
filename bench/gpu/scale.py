"""Sizes of the measurements: those of a card, and tiny ones to rehearse the script where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from kernels.aot_cases import MODELS, Model


class Scale(NamedTuple):
    """What is measured at which sizes."""

    model: Model
    """Of kernels and steps."""
    chain: Model
    """Of the target that is served with a set acceptance rate."""
    dtype: torch.dtype
    tiers: tuple[int, ...]
    context: int
    """Positions of every slot, where kernels and steps are timed."""
    repeats: int
    head_rows: tuple[int, ...]
    """R of the sequential head's share, and of fused against unfused."""
    requests: tuple[int, ...]
    """Concurrency of the throughput."""
    overlap_requests: tuple[int, ...]
    text_requests: tuple[int, ...]
    """Concurrency with the real drafter."""
    text_tokens: int
    """Longest answer with it."""
    acceptance: float
    seconds: float
    """Of each measurement of throughput."""
    min_steps: int
    """And steps that it has at least."""
    max_model_len: int
    kv_memory: int
    executors: Mapping[str, Any]
    """Settings of verifier and drafter."""


FULL = Scale(
    model=MODELS["Qwen3-4B"],
    chain=Model(2048, 6144, 16, 8, 128, 151936, 28, 5, 5, 256, 7),  # as Qwen3-1.7B
    dtype=torch.bfloat16,
    tiers=(8, 16, 32, 64, 128, 256, 512),
    context=1024,
    repeats=20,
    head_rows=(1, 128),
    requests=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    overlap_requests=(1, 16, 128),
    text_requests=(1, 8, 32),
    text_tokens=128,
    acceptance=0.8,
    seconds=1.0,
    min_steps=20,
    max_model_len=4096,
    kv_memory=24 * 2**30,
    executors={"device": "cuda"},
)
REHEARSAL = Scale(
    model=Model(64, 128, 4, 2, 16, 512, 2, 1, 2, 8, 7),
    chain=Model(64, 128, 4, 2, 16, 512, 3, 1, 2, 32, 3, torch.float32),
    dtype=torch.float32,
    tiers=(8, 16),
    context=32,
    repeats=1,
    head_rows=(1, 2),
    requests=(1, 2),
    overlap_requests=(1,),
    text_requests=(1,),
    text_tokens=4,
    acceptance=0.8,
    seconds=0.0,
    min_steps=2,
    max_model_len=256,
    kv_memory=2**23,
    executors={"kernels": "cpu", "weight_format": "float32", "threads": 1},
)
"""For Triton's interpreter, and the CPU's kernels where it would take minutes: times mean nothing."""
