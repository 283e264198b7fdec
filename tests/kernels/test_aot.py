"""Every Triton kernel compiles for the GPUs we name, and what it takes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

from kernels.aot import MAX_SHARED_BYTES, TARGETS, Usage, as_markdown, compiling_for, heads_markdown, usages
from kernels.aot_cases import CASES, floats, ints
from kernels.aot_index import PAGE_TABLE, narrow_factors

ROOT = Path(__file__).parents[2]
MODELS = "Qwen3-8B", "Qwen2.5-7B", "Qwen3-8B, float32"
"""The larger model, and heads that need the most registers."""
NARROW = {
    "num_tiles": "tiles of a row",
    "num_draft_tiles": "tiles of a row",
    "survivals_stride": "drafts of a request",
    "draft_ids_stride": "drafts of a request",
    "token_ids_stride": "tokens that a request emits",
    "confidence_stride": "drafts of a request",
    "joint_stride": "outputs of the head for a block, at most block_size · 3 · rank",
    "rank": "of the head",
    "num_asked": "probabilities asked of a row",
    "num_sequences": "banned sequences of a request",
    "max_len": "of a banned sequence",
    "num_stops": "stop tokens of a request",
    "num_slots": "drafts of a request",
    "num_rows": "requests, times drafts of a request",
    "draft_row_stride": "one draft's distribution: drafts of a block times the vocabulary",
    "max_tokens": "tokens that a request emits",
    "max_top": "likeliest tokens of a position",
}
"""Factors of 32-bit products, by what they count; the other factor is rows of a step, requests or drafts of a block."""


@pytest.fixture(scope="module")
def compiled() -> list[Usage]:
    return list(usages(models=MODELS))


def test_every_operation_is_compiled_for_every_target(compiled: list[Usage]) -> None:
    folders = {path.parent.name for path in ROOT.glob("kernels/*/triton.py")}
    assert folders == set(CASES)
    for target in TARGETS:
        assert {usage.operation for usage in compiled if usage.target == target} == folders
    table = as_markdown(compiled)
    assert all(f"| {usage.kernel} |" in table for usage in compiled)
    assert all(f"| {model} | block_attend_kernel |" in heads_markdown(compiled) for model in MODELS)


def test_no_kernel_of_attention_or_sampling_spills(compiled: list[Usage]) -> None:
    spilling = {(usage.kernel, usage.target, usage.spilled_bytes) for usage in compiled if usage.spilled_bytes}
    assert spilling == set()


def test_shared_memory_fits_a_block(compiled: list[Usage]) -> None:
    too_large = {
        (usage.kernel, usage.target) for usage in compiled if usage.shared_bytes > MAX_SHARED_BYTES[usage.target]
    }
    assert too_large == set()


def test_rows_and_pages_are_multiplied_in_64_bits(compiled: list[Usage]) -> None:
    narrow = {(factor, usage.kernel) for usage in compiled for factor in usage.narrow_factors}
    assert {found for found in narrow if found[0] not in NARROW} == set()


def test_narrow_products_are_seen() -> None:
    from aot_probe import narrow

    with compiling_for(90) as kernels:
        narrow(floats(4), ints(4), floats(4))
    assert narrow_factors(kernels[0][1].asm["ttir"]) == {"row_stride", PAGE_TABLE}


def test_a_kernel_that_spills_is_seen() -> None:
    """So that no spills means something: 64 KiB of accumulators a warp cannot stay in registers."""
    from aot_probe import hoard

    with compiling_for(90) as kernels:
        hoard(floats(128, 128))
    from kernels.aot import resource_usage

    _, spilled = resource_usage(kernels[0][1].asm["cubin"])
    assert spilled > 0


def test_the_interpreter_is_told_from_the_compiler() -> None:
    code = "from kernels.aot import compiling_for\nwith compiling_for(90): pass"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "this process interprets kernels" in run.stderr
