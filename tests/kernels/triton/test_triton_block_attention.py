"""Draft block attention in Triton against the plain reference, which gets float32 copies, and its exactness."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.block_attention import reference, triton
from kernels.paged_attention import reference as pages
from tests.kernels.attention_cases import Case, Store, int32, make_store, unwritten

EPS = 1e-5
CONTEXTS = (300, 0, 48)
"""Context length of each slot."""
CASES = [
    Case(num_heads=6, num_kv_heads=2, head_dim=16),
    Case(num_heads=4, num_kv_heads=1, head_dim=48, page_size=32, window=5, has_norms=True),
    Case(num_heads=14, num_kv_heads=2, head_dim=16),  # a K/V head's queries are too many for one program
]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def filled_store(case: Case, dtype: torch.dtype = torch.float32) -> Store:
    store = make_store(case, max_len=320)
    for slot, length in enumerate(CONTEXTS):
        kv = torch.randn(length, case.kv_width, generator=torch.Generator().manual_seed(slot))
        rows = (torch.arange(length, dtype=torch.int32), torch.full((length,), slot, dtype=torch.int32))
        pages.write_context(kv, *rows, *store.pages, store.k_norm, EPS)
    return store._replace(keys=store.keys.to(dtype), values=store.values.to(dtype))


def attend(
    case: Case, store: Store, qkv: Tensor, anchors: Tensor, row_slots: Tensor, block_len: int, module: object = triton
) -> Tensor:
    out = unwritten(len(qkv), case).to(qkv.dtype)
    module.block_attention(  # type: ignore[attr-defined]
        qkv, anchors, row_slots, block_len, *store.pages, store.q_norm, store.k_norm, EPS, case.window, out
    )
    return out


@pytest.mark.parametrize(
    ("case", "block_len", "dtype"),
    [
        (CASES[0], 1, torch.float32),
        (CASES[0], 20, torch.float32),
        (CASES[0], 7, torch.float16),
        (CASES[0], 7, torch.bfloat16),
        (CASES[1], 7, torch.float32),
        (CASES[1], 20, torch.float32),
        (CASES[1], 7, torch.bfloat16),
        (CASES[2], 7, torch.float32),
        (CASES[2], 16, torch.bfloat16),
    ],
)
def test_matches_reference_and_leaves_pages_alone(case: Case, block_len: int, dtype: torch.dtype) -> None:
    store = filled_store(case, dtype)
    before, slots = store.clone_pages(), (2, 0, 1, 0)
    qkv = torch.randn(len(slots) * block_len, case.width, generator=torch.Generator().manual_seed(block_len)).to(dtype)
    rows = int32(*(CONTEXTS[slot] for slot in slots)), int32(*slots), block_len
    plain = store._replace(keys=store.keys.float(), values=store.values.float())
    expected = attend(case, plain, qkv.float(), *rows, reference)
    out = attend(case, store, qkv, *rows)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.equal(store.keys.nan_to_num(7.0), before.keys.nan_to_num(7.0))
    assert torch.equal(store.values.nan_to_num(7.0), before.values.nan_to_num(7.0))


@pytest.mark.parametrize("case", CASES)
def test_a_block_depends_on_no_other_and_padding_is_left_out(case: Case) -> None:
    """Ten blocks have more rows than those whose contexts are shared by programs; one has not."""
    store, block_len = filled_store(case), 7
    slots = [0, 1, -1, 2, *[-1] * 6]
    anchors = int32(*(CONTEXTS[slot] if slot >= 0 else 0 for slot in slots))
    qkv = torch.randn(len(slots) * block_len, case.width)
    together = attend(case, store, qkv, anchors, int32(*slots), block_len)
    for block, slot in enumerate(slots):
        rows = slice(block * block_len, (block + 1) * block_len)
        if slot < 0:
            assert together[rows].isnan().all()
        else:
            alone = attend(case, store, qkv[rows], anchors[block : block + 1], int32(slot), block_len)
            assert torch.equal(alone, together[rows])


def test_positions_from_the_anchor_on_are_not_read() -> None:
    """What verification wrote for rejected drafts lies behind the anchor and must not count."""
    case, store = CASES[0], filled_store(CASES[0])
    rows = (torch.randn(7, case.width), int32(40), int32(0), 7)
    expected = attend(case, store, *rows)
    for position in range(40, 64):
        page = store.page_table[0, position // case.page_size]
        store.keys[page, :, :, position % case.page_size] = 1e4
        store.values[page, :, position % case.page_size] = 1e4
    assert torch.equal(attend(case, store, *rows), expected)


def test_no_blocks() -> None:
    case = CASES[0]
    attend(case, filled_store(case), torch.empty(0, case.width), int32(), int32(), 7)
