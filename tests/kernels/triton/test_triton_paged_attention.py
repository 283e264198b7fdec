"""Paged attention in Triton against the plain reference, which gets float32 copies, and its exactness."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import reference, triton
from tests.kernels.attention_cases import Case, Store, int32, make_store, unwritten

EPS = 1e-5
PLAIN = Case(num_heads=6, num_kv_heads=2, head_dim=16)
WINDOWED = Case(num_heads=4, num_kv_heads=1, head_dim=48, page_size=32, window=20, has_norms=True)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXED = {0: (0, 35), 1: (64, 1), 2: (300, 8), 3: (0, 1)}
"""First position and count by slot: a prefill chunk of several tiles, a decode row, a verify window, a first token."""


def cast(store: Store, dtype: torch.dtype) -> Store:
    return store._replace(keys=store.keys.to(dtype), values=store.values.to(dtype))


def attend(
    case: Case, store: Store, qkv: Tensor, positions: Tensor, row_slots: Tensor, module: object = triton
) -> Tensor:
    out = unwritten(len(qkv), case).to(qkv.dtype)
    module.paged_attention(  # type: ignore[attr-defined]
        qkv, positions, row_slots, *store.pages, store.q_norm, store.k_norm, EPS, case.window, out
    )
    return out


def rows_of(spans: dict[int, tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Positions and slots."""
    rows = [(start + i, slot) for slot, (start, count) in spans.items() for i in range(count)]
    return int32(*(position for position, _ in rows)), int32(*(slot for _, slot in rows))


def filled(case: Case, lengths: dict[int, int], dtype: torch.dtype = torch.float32) -> Store:
    """Pages that hold a random context of each slot; the rest is NaN."""
    store = make_store(case, num_slots=4, max_len=320)
    positions, slots = rows_of({slot: (0, length) for slot, length in lengths.items()})
    kv = torch.randn(len(positions), case.kv_width, generator=torch.Generator().manual_seed(1))
    reference.write_context(kv, positions, slots, *store.pages, store.k_norm, EPS)
    return cast(store, dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(PLAIN, dtype) for dtype in TOLERANCES] + [(WINDOWED, torch.float32), (WINDOWED, torch.bfloat16)],
)
def test_mixed_rows_match_reference(case: Case, dtype: torch.dtype) -> None:
    store = filled(case, {slot: start for slot, (start, _) in MIXED.items()}, dtype)
    expected_store = cast(store.clone_pages(), torch.float32)
    positions, slots = rows_of(MIXED)
    qkv = torch.randn(len(positions), case.width, generator=torch.Generator().manual_seed(2)).to(dtype)
    untouched = qkv.clone()
    out = attend(case, store, qkv, positions, slots)
    expected = attend(case, expected_store, qkv.float(), positions, slots, reference)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(out.float(), expected, **close)
    torch.testing.assert_close(store.keys.float(), expected_store.keys, equal_nan=True, **close)
    assert torch.equal(store.values.float().nan_to_num(7.0), expected_store.values.nan_to_num(7.0))
    assert torch.equal(qkv, untouched)


@pytest.mark.parametrize("case", [PLAIN, WINDOWED])
def test_a_row_does_not_depend_on_its_batch(case: Case) -> None:
    """Alone, beside others whose contexts are shared by programs, and in a call large enough for none to be."""
    store = filled(case, {0: 0, 1: 64, 2: 300, 3: 0})
    positions, slots = rows_of({0: (0, 70), 2: (300, 8), 1: (64, 1)})
    qkv = torch.randn(len(positions), case.width, generator=torch.Generator().manual_seed(3))
    together = attend(case, store, qkv, positions, slots)
    for rows in (slice(78, 79), slice(70, 78), slice(56, 79)):
        assert torch.equal(attend(case, store, qkv[rows], positions[rows], slots[rows]), together[rows]), rows


def test_every_verify_length_gives_the_rows_of_the_longest() -> None:
    store = filled(PLAIN, {0: 40})
    positions, slots = rows_of({0: (40, 8)})
    qkv = torch.randn(8, PLAIN.width)
    longest = attend(PLAIN, store, qkv, positions, slots)
    for length in range(7):
        rows = slice(0, length + 1)
        assert torch.equal(attend(PLAIN, store, qkv[rows], positions[rows], slots[rows]), longest[rows])


@pytest.mark.parametrize("num_padding", [3, 70])
def test_padding_rows_write_nothing(num_padding: int) -> None:
    store = filled(PLAIN, {0: 20, 1: 33})
    positions, slots = rows_of({0: (20, 3), 1: (33, 1)})
    qkv = torch.randn(4 + num_padding, PLAIN.width)
    expected_store = store.clone_pages()
    expected = attend(PLAIN, expected_store, qkv[:4], positions, slots)
    padded = torch.cat((positions, int32(*[0] * num_padding))), torch.cat((slots, int32(*[-1] * num_padding)))
    out = attend(PLAIN, store, qkv, *padded)
    assert torch.equal(out[:4], expected)
    assert out[4:].isnan().all()
    assert torch.equal(store.keys.nan_to_num(7.0), expected_store.keys.nan_to_num(7.0))
    assert torch.equal(store.values.nan_to_num(7.0), expected_store.values.nan_to_num(7.0))


def test_pages_past_two_billion_elements(tmp_path: Path) -> None:
    """In a file with holes: no memory is taken for the pages between."""
    case, num_pages = Case(num_heads=1, num_kv_heads=1, head_dim=16), 2**23 + 8
    size = num_pages * case.head_dim * case.page_size
    keys, values = (
        torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.float16)
        for name in ("keys", "values")
    )
    far = make_store(case, num_slots=1, max_len=32)
    near = cast(far, torch.float16)
    far = far._replace(
        page_table=int32(2**23 + 2, 2**23 + 5)[None],
        keys=keys.view(num_pages, 1, case.head_dim, case.page_size),
        values=values.view(num_pages, 1, case.page_size, case.head_dim),
    )
    qkv, (positions, slots) = torch.randn(20, case.width).half(), rows_of({0: (0, 20)})
    assert torch.equal(attend(case, far, qkv, positions, slots), attend(case, near, qkv, positions, slots))
    assert (far.keys[2**23 + 2] == near.keys[near.page_table[0, 0]]).all()


def test_no_rows() -> None:
    store = filled(PLAIN, {})
    attend(PLAIN, store, torch.empty(0, PLAIN.width), int32(), int32())
    assert store.keys.isnan().all()


def test_written_context_is_what_attention_writes() -> None:
    first, second = make_store(WINDOWED), make_store(WINDOWED)
    qkv, (positions, slots) = torch.randn(20, WINDOWED.width), rows_of({1: (5, 20)})
    attend(WINDOWED, first, qkv, positions, slots)
    kv = qkv[:, -WINDOWED.kv_width :].contiguous()
    triton.write_context(kv, positions, slots, *second.pages, second.k_norm, EPS)
    assert torch.equal(first.keys.nan_to_num(7.0), second.keys.nan_to_num(7.0))
    assert torch.equal(first.values.nan_to_num(7.0), second.values.nan_to_num(7.0))


def test_wrong_layouts_are_refused() -> None:
    store, qkv = make_store(PLAIN), torch.randn(1, PLAIN.width)
    with pytest.raises(ValueError, match=r"positions must be contiguous torch\.int32"):
        attend(PLAIN, store, qkv, torch.tensor([0]), int32(0))
    narrow = PLAIN._replace(page_size=8)
    with pytest.raises(ValueError, match="page_size 8 must be a multiple of 16"):
        attend(narrow, make_store(narrow), qkv, int32(0), int32(0))
