"""Pages of K/V positions: who holds them, and whether the drafter has ingested them.

A page id means the same positions in the target cache and in the draft cache, so one allocator serves both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PageAllocator:
    """A pool of pages with reference counts."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """All pages free. `page_size`: positions a page."""
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the warmest in cache
        self._references = [0] * num_pages
        self._has_draft_context = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold positions 0 ... num_positions - 1."""
        return -(-num_positions // self.page_size)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one reference. Ask `can_allocate` first."""
        assert self.can_allocate(count), "allocate without can_allocate"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages in use."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page; the last one returns it to the pool and clears its flag."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} freed twice"
            self._references[page] -= 1
            if not self._references[page]:
                self._has_draft_context[page] = False
                self._free.append(page)

    def mark_draft_context(self, page: int) -> None:
        """Every position of the page has been ingested, as the drafter acknowledged."""
        self._has_draft_context[page] = True

    def has_draft_context(self, pages: Iterable[int]) -> bool:
        """Whether every one of `pages` is marked."""
        return all(self._has_draft_context[page] for page in pages)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless free pages and the holders' page lists account for every reference."""
        held = Counter(page for pages in holders for page in pages)
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        for page, references in enumerate(self._references):
            assert held[page] == references, f"page {page}: {references} references, {held[page]} holders"
        assert len(self._free) + len(held) == self.num_pages, "a page is neither free nor held"
        assert not any(self._has_draft_context[page] for page in self._free), "a free page is marked as ingested"
