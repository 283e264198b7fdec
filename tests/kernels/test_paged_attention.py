"""Paged attention against the plain reference, and its exactness. Tolerance 1e-5: unit-scale float32 data.

With float16 pages a K that both compute with other last bits may be rounded to neighbours: tolerance 2e-3, but where K
and V are float16's own numbers, the bits are those of float32 pages.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import native
from kernels.paged_attention import cpu, reference
from tests.kernels.attention_cases import CASES, HALF_CASES, Case, Store, int32, make_store, unwritten

EPS = 1e-5


def tolerance(case: Case) -> dict[str, float]:
    return dict.fromkeys(("rtol", "atol"), 1e-5 if case.kv_dtype is torch.float32 else 2e-3)


def attend(case: Case, store: Store, qkv: Tensor, positions: Tensor, row_slots: Tensor, module: object = cpu) -> Tensor:
    out = unwritten(len(qkv), case)
    module.paged_attention(  # type: ignore[attr-defined]
        qkv, positions, row_slots, *store.pages, store.q_norm, store.k_norm, EPS, case.window, out
    )
    return out


@pytest.mark.parametrize("case", CASES + HALF_CASES)
def test_matches_reference_over_prefill_verify_and_decode_rows(case: Case) -> None:
    store = make_store(case)
    expected_store = store.clone_pages()
    spans = [{0: (0, 33), 1: (0, 1)}, {0: (33, 1), 1: (1, 7), 2: (0, 100)}, {2: (100, 8), 0: (34, 8), 1: (8, 1)}]
    for call, rows in enumerate(spans):
        positions = int32(*(start + i for start, count in rows.values() for i in range(count)))
        row_slots = int32(*(slot for slot, (_, count) in rows.items() for _ in range(count)))
        qkv = torch.randn(len(positions), case.width, generator=torch.Generator().manual_seed(call))
        untouched = qkv.clone()
        out = attend(case, store, qkv, positions, row_slots)
        expected = attend(case, expected_store, qkv, positions, row_slots, reference)
        torch.testing.assert_close(out, expected, **tolerance(case))
        torch.testing.assert_close(store.keys, expected_store.keys, **tolerance(case), equal_nan=True)
        assert torch.equal(store.values.nan_to_num(7.0), expected_store.values.nan_to_num(7.0))
        assert torch.equal(qkv, untouched)


@pytest.mark.parametrize("case", CASES + HALF_CASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_does_not_depend_on_its_batch(case: Case, seed: int) -> None:
    """The same tokens in calls cut at random, beside random other rows, on other pages: the same bits."""
    length, source = 75, random.Random(seed)
    alone, together = make_store(case), make_store(case, seed=seed + 1)
    together = together._replace(cos=alone.cos, sin=alone.sin, q_norm=alone.q_norm, k_norm=alone.k_norm)
    qkv = torch.randn(3, length, case.width)
    expected = torch.stack(
        [
            torch.cat([attend(case, alone, qkv[slot, p : p + 1], int32(p), int32(slot)) for p in range(length)])
            for slot in range(3)
        ]
    )
    done = [0, 0, 0]
    while min(done) < length:
        counts = {
            slot: min(source.choice([0, 1, 1, 4, 8, 23]), length - done[slot]) for slot in source.sample(range(3), 3)
        }
        rows = [(slot, done[slot] + i) for slot, count in counts.items() for i in range(count)]
        if not rows:
            continue
        slots, positions = zip(*rows, strict=True)
        out = attend(case, together, qkv[slots, positions], int32(*positions), int32(*slots))
        assert torch.equal(out, expected[slots, positions]), rows
        for slot, count in counts.items():
            done[slot] += count


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(window=300),
        Case(num_heads=7, num_kv_heads=1, head_dim=80),
        Case(window=300, kv_dtype=torch.float16),
        Case(num_heads=7, num_kv_heads=1, head_dim=80, kv_dtype=torch.float16),
    ],
)
def test_long_contexts_match_reference_and_do_not_depend_on_the_batch(case: Case) -> None:
    """Several segments: computed tile by tile in one call, apart and by several threads when there are few rows."""
    length, context = 530, torch.arange(530, dtype=torch.int32)
    store = make_store(case, num_slots=1, max_len=length)
    expected_store = store.clone_pages()
    qkv, slots = torch.randn(length, case.width), torch.zeros(length, dtype=torch.int32)
    out = attend(case, store, qkv, context, slots)
    expected = attend(case, expected_store, qkv, context, slots, reference)
    torch.testing.assert_close(out, expected, **tolerance(case))
    threads = native.num_threads()
    try:
        native.set_num_threads(3)
        for rows in (slice(529, 530), slice(522, 530), slice(255, 257), slice(250, 270), slice(511, 513)):
            assert torch.equal(attend(case, store, qkv[rows], context[rows], slots[rows]), out[rows]), rows
    finally:
        native.set_num_threads(threads)


@pytest.mark.parametrize("case", [case for case in HALF_CASES if not case.has_norms])
def test_float16_pages_give_the_bits_of_float32_pages_that_hold_the_same(case: Case) -> None:
    wide = make_store(case._replace(kv_dtype=torch.float32), num_slots=1, max_len=300)
    wide = wide._replace(cos=torch.ones_like(wide.cos), sin=torch.zeros_like(wide.sin))
    narrow = wide._replace(keys=wide.keys.half(), values=wide.values.half())
    qkv, positions = torch.randn(300, case.width).half().float(), torch.arange(300, dtype=torch.int32)
    slots = torch.zeros(300, dtype=torch.int32)
    assert torch.equal(attend(case, narrow, qkv, positions, slots), attend(case, wide, qkv, positions, slots))
    assert torch.equal(narrow.keys.float().nan_to_num(7.0), wide.keys.nan_to_num(7.0))
    assert torch.equal(narrow.values.float().nan_to_num(7.0), wide.values.nan_to_num(7.0))


@pytest.mark.parametrize("module", [cpu, reference])
def test_float16_pages_round_to_even_and_saturate(module: Any) -> None:
    """Also what only just rounds to infinity, and subnormal numbers; not a number stays that."""
    case = Case(num_heads=1, num_kv_heads=1, head_dim=16, kv_dtype=torch.float16)
    store = make_store(case, num_slots=1)
    store = store._replace(cos=torch.ones_like(store.cos), sin=torch.zeros_like(store.sin))
    written = (65504.0, 65519.0, 65520.0, 1e9, torch.inf, 2049.0, 2051.0, 2**-24, 2**-25, 3 * 2**-25, 6.1e-5, 1e-30)
    read = (65504.0, 65504.0, 65504.0, 65504.0, 65504.0, 2048.0, 2052.0, 2**-24, 0.0, 2**-23, 6.097555e-5, 0.0)
    values = torch.tensor([*written, -70000.0, -1e-8, 1.0, torch.nan])
    expected = torch.tensor([*read, -65504.0, -0.0, 1.0, torch.nan])
    keys = values.nan_to_num(0.25, torch.inf).clamp(-1e30, 1e30)  # rotation makes NaN of infinity
    kv = torch.cat((keys, values))[None]
    module.write_context(kv, int32(3), int32(0), *store.pages, None, EPS)
    page = store.page_table[0, 0]
    torch.testing.assert_close(store.values[page, 0, 3].float(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(store.keys[page, 0, :, 3].float(), expected.nan_to_num(0.25))


def test_threads_do_not_change_bits() -> None:
    case = Case()
    qkv = torch.randn(150, case.width)
    rows = (qkv, torch.arange(150, dtype=torch.int32), torch.zeros(150, dtype=torch.int32))
    threads = native.num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            native.set_num_threads(count)
            results.append(attend(case, make_store(case), *rows))
    finally:
        native.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("case", CASES + HALF_CASES)
def test_write_context_matches_reference(case: Case) -> None:
    store = make_store(case)
    expected = store.clone_pages()
    kv = torch.randn(41, case.kv_width)
    positions, row_slots = int32(*range(15, 36), *range(20)), int32(*[1] * 21, *[2] * 20)
    for module, target in ((cpu, store), (reference, expected)):
        module.write_context(kv, positions, row_slots, *target.pages, store.k_norm, EPS)
    torch.testing.assert_close(store.keys, expected.keys, **tolerance(case), equal_nan=True)
    assert torch.equal(store.values.nan_to_num(7.0), expected.values.nan_to_num(7.0))


def test_written_context_is_what_attention_writes() -> None:
    """The draft context may be written alone: K and V are those of the attention call, bit for bit."""
    case = CASES[1]
    first, second = make_store(case), make_store(case)
    qkv = torch.randn(20, case.width)
    rows = (torch.arange(20, dtype=torch.int32), torch.zeros(20, dtype=torch.int32))
    attend(case, first, qkv, *rows)
    cpu.write_context(qkv[:, -case.kv_width :].contiguous(), *rows, *second.pages, second.k_norm, EPS)
    assert torch.equal(first.keys.nan_to_num(7.0), second.keys.nan_to_num(7.0))
    assert torch.equal(first.values.nan_to_num(7.0), second.values.nan_to_num(7.0))


def test_wrong_layouts_are_refused() -> None:
    case = Case()
    store = make_store(case)
    qkv, out = torch.randn(1, case.width), unwritten(1, case)
    rest = (*store.pages, None, None, EPS, 0, out)
    with pytest.raises(ValueError, match=r"torch\.int32"):
        cpu.paged_attention(qkv, torch.tensor([0]), int32(0), *rest)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.paged_attention(torch.randn(1, 2 * case.width)[:, ::2], int32(0), int32(0), *rest)
    mixed = store._replace(values=store.values.half())
    with pytest.raises(ValueError, match=r"needs a contiguous torch\.float32 tensor, got torch\.float16"):
        cpu.paged_attention(qkv, int32(0), int32(0), *mixed.pages, None, None, EPS, 0, out)
    narrow = make_store(Case(page_size=8))
    with pytest.raises(ValueError, match="page_size 8 must be multiples of 16"):
        cpu.paged_attention(qkv, int32(0), int32(0), *narrow.pages, None, None, EPS, 0, out)
