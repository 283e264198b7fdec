"""Pages: no page leaked, none owned twice, flags cleared when a page comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.pages import PageAllocator


def test_pages_for_positions() -> None:
    pages = PageAllocator(4, 16)
    assert [pages.pages_for(count) for count in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_the_last_reference_returns_a_page_and_clears_its_flag() -> None:
    pages = PageAllocator(3, 4)
    first = pages.allocate(2)
    for page in first:
        pages.mark_draft_context(page)
    pages.share(first)
    pages.free(first)
    assert pages.num_free == 1
    assert pages.has_draft_context(first)
    pages.check_integrity([first])
    pages.free(first)
    assert pages.num_free == 3
    assert not pages.has_draft_context(first[:1])
    pages.check_integrity([])


def test_ask_before_allocating() -> None:
    pages = PageAllocator(2, 4)
    assert pages.can_allocate(2)
    assert not pages.can_allocate(3)
    with pytest.raises(AssertionError, match="without can_allocate"):
        pages.allocate(3)
    held = pages.allocate(1)
    pages.free(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free(held)
    with pytest.raises(AssertionError, match="is free"):
        pages.share(held)


def test_integrity_sees_a_leak_and_a_stranger() -> None:
    pages = PageAllocator(3, 4)
    held = pages.allocate(2)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pages.check_integrity([held[:1]])
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        pages.check_integrity([held, held[:1]])
    with pytest.raises(AssertionError, match="0 references, 1 holders"):
        pages.check_integrity([[0, 1, 2]])


def named(pages: PageAllocator) -> set[int]:
    found = (pages.find(bytes([name])) for name in range(6))
    return {page for page in found if page is not None}


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "free", "name", "take", "forget"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_any_sequence_of_operations_keeps_the_books(operations: list[tuple[str, int]]) -> None:
    pages = PageAllocator(8, 4)
    holders: list[list[int]] = []
    for operation, argument in operations:
        if operation == "allocate" and pages.can_allocate(argument):
            holders.append(pages.allocate(argument))
        elif operation == "share" and holders:
            shared = list(holders[argument % len(holders)])
            pages.share(shared)
            holders.append(shared)
        elif operation == "free" and holders:
            pages.free(holders.pop(argument % len(holders)))
        elif operation == "name" and holders and holders[-1] and holders[-1][0] not in named(pages):
            pages.set_name(holders[-1][0], bytes([argument]))
        elif operation == "take" and (found := pages.find(bytes([argument]))) is not None:
            pages.share([found])
            holders.append([found])
        elif operation == "forget":
            pages.forget(range(argument))
        pages.check_integrity(holders)
        assert pages.num_free == 8 - len({page for holder in holders for page in holder})


def test_named_pages_outlive_their_last_reference_and_go_when_the_pool_needs_them() -> None:
    pages = PageAllocator(4, 4)
    chain = pages.allocate(3)
    for page, name in zip(chain, (b"0", b"1", b"2"), strict=True):
        pages.set_name(page, name)
        pages.mark_draft_context(page)
    pages.free(chain)
    assert (pages.num_free, pages.num_idle) == (4, 3)
    pages.check_integrity([])
    taken = pages.allocate(2)  # the free one, then the end of the chain: what it starts with is of use alone
    assert chain[2] in taken
    assert [pages.find(name) for name in (b"0", b"1", b"2")] == [chain[0], chain[1], None]
    assert not pages.has_draft_context([chain[2]])
    pages.share([chain[0]])
    assert pages.num_idle == 1
    assert pages.has_draft_context([chain[0]])
    pages.free([chain[0]])
    pages.allocate(1)  # page 1 of the chain was used less recently than page 0
    assert [pages.find(name) for name in (b"0", b"1")] == [chain[0], None]
    pages.check_integrity([taken, [chain[1]]])


def test_a_name_moves_to_the_page_that_is_given_it() -> None:
    pages = PageAllocator(2, 4)
    (first,) = pages.allocate(1)
    pages.set_name(first, b"x")
    pages.free([first])
    (second,) = pages.allocate(1)
    pages.set_name(second, b"x")
    assert (pages.find(b"x"), pages.num_idle) == (second, 0)
    with pytest.raises(AssertionError, match="has a name"):
        pages.set_name(second, b"y")
    with pytest.raises(AssertionError, match="is free"):
        pages.set_name(first, b"y")
    pages.check_integrity([[second]])


def test_new_epochs() -> None:
    pages = PageAllocator(3, 4)
    held, idle = pages.allocate(2)
    for page in (held, idle):
        pages.set_name(page, bytes([page]))
        pages.mark_draft_context(page)
    pages.free([idle])
    pages.clear_draft_context()  # of the drafter
    assert not pages.has_draft_context([held])
    assert pages.num_idle == 1
    pages.mark_draft_context(held)
    pages.forget_all()  # of the verifier
    assert not pages.has_draft_context([held])
    assert (pages.num_idle, pages.num_free, pages.find(bytes([held]))) == (0, 2, None)
    pages.check_integrity([[held]])
