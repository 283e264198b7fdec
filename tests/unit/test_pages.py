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


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5)), max_size=60))
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
        pages.check_integrity(holders)
        assert pages.num_free == 8 - len({page for holder in holders for page in holder})
