"""Draft block attention against the plain reference, and its exactness. Tolerance 1e-5: unit-scale float32 data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.block_attention import cpu, reference
from kernels.paged_attention import reference as pages
from tests.kernels.attention_cases import CASES, HALF_CASES, Case, Store, int32, make_store, unwritten

EPS = 1e-5
CONTEXTS = (100, 0, 48)
"""Context length of each slot."""


def filled_store(case: Case) -> Store:
    store = make_store(case)
    for slot, length in enumerate(CONTEXTS):
        kv = torch.randn(length, case.kv_width, generator=torch.Generator().manual_seed(slot))
        rows = (torch.arange(length, dtype=torch.int32), torch.full((length,), slot, dtype=torch.int32))
        pages.write_context(kv, *rows, *store.pages, store.k_norm, EPS)
    return store


def attend(
    case: Case, store: Store, qkv: Tensor, anchors: Tensor, row_slots: Tensor, block_len: int, module: object = cpu
) -> Tensor:
    out = unwritten(len(qkv), case)
    module.block_attention(  # type: ignore[attr-defined]
        qkv, anchors, row_slots, block_len, *store.pages, store.q_norm, store.k_norm, EPS, case.window, out
    )
    return out


@pytest.mark.parametrize("case", CASES + HALF_CASES)
@pytest.mark.parametrize("block_len", [1, 7, 16, 20])
def test_matches_reference_and_leaves_pages_alone(case: Case, block_len: int) -> None:
    store = filled_store(case)
    before = store.clone_pages()
    slots = (2, 0, 1, 0)
    qkv = torch.randn(len(slots) * block_len, case.width, generator=torch.Generator().manual_seed(block_len))
    rows = (qkv, int32(*(CONTEXTS[slot] for slot in slots)), int32(*slots), block_len)
    expected = attend(case, store, *rows, reference)
    torch.testing.assert_close(attend(case, store, *rows), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(store.keys.nan_to_num(7.0), before.keys.nan_to_num(7.0))
    assert torch.equal(store.values.nan_to_num(7.0), before.values.nan_to_num(7.0))


@pytest.mark.parametrize("case", HALF_CASES)
def test_float16_pages_give_the_bits_of_float32_pages_that_hold_the_same(case: Case) -> None:
    narrow, block_len = filled_store(case), 7
    wide = narrow._replace(keys=narrow.keys.float(), values=narrow.values.float())
    rows = torch.randn(3 * block_len, case.width), int32(*CONTEXTS), int32(0, 1, 2), block_len
    assert torch.equal(attend(case, narrow, *rows), attend(case, wide, *rows))


@pytest.mark.parametrize("case", CASES + HALF_CASES)
def test_a_block_does_not_depend_on_other_blocks(case: Case) -> None:
    store, block_len = filled_store(case), 7
    qkv = torch.randn(3 * block_len, case.width)
    together = attend(case, store, qkv, int32(*CONTEXTS), int32(0, 1, 2), block_len)
    for slot, context in enumerate(CONTEXTS):
        rows = slice(slot * block_len, (slot + 1) * block_len)
        assert torch.equal(attend(case, store, qkv[rows], int32(context), int32(slot), block_len), together[rows])


def test_positions_from_the_anchor_on_are_not_read() -> None:
    """What verification wrote for rejected drafts lies behind the anchor and must not count."""
    case, store = Case(), filled_store(Case())
    rows = (torch.randn(7, case.width), int32(40), int32(0), 7)
    expected = attend(case, store, *rows)
    for position in range(40, CONTEXTS[0]):
        page = store.page_table[0, position // case.page_size]
        store.keys[page, :, :, position % case.page_size] = 1e4
        store.values[page, :, position % case.page_size] = 1e4
    assert torch.equal(attend(case, store, *rows), expected)
