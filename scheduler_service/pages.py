"""Pages of K/V positions: who holds them, what is known of their content, and whether the drafter has ingested them.

A page id means the same positions in the target cache and in the draft cache, so one allocator serves both. A page with
a *name* (see `prefix_cache`) outlives its last reference: it stays *idle*, its content intact, until somebody takes it
again by name or the pool needs it. Idle pages are evicted least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class PageAllocator:
    """A pool of pages with reference counts, and an index of those whose content has a name."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """All pages free. `page_size`: positions a page."""
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the warmest in cache
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_pages
        self._names: list[bytes | None] = [None] * num_pages
        self._by_name: dict[bytes, int] = {}
        self._has_draft_context = [False] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages kept for their content alone."""
        return len(self._idle)

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold positions 0 ... num_positions - 1."""
        return -(-num_positions // self.page_size)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages are free or idle."""
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each with one reference; idle ones last. Ask `can_allocate` first."""
        assert self.can_allocate(count), "allocate without can_allocate"
        while len(self._free) < count:
            self.forget([next(iter(self._idle))])
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages in use or idle."""
        for page in pages:
            assert self._references[page] > 0 or page in self._idle, f"page {page} is free"
            self._idle.pop(page, None)
            self._references[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drops one reference of each page; the last one makes a page idle if it has a name, else free.

        `pages` in the order of their positions: of those that become idle the last is evicted first, since a prefix is
        of use without what follows it and not the other way round.
        """
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} freed twice"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._names[page] is None:
                self._to_pool(page)
            else:
                self._idle[page] = None

    def is_idle(self, page: int) -> bool:
        """Whether the page is kept for its content alone."""
        return page in self._idle

    def find(self, name: bytes) -> int | None:
        """The page of that name."""
        return self._by_name.get(name)

    def set_name(self, page: int, name: bytes) -> None:
        """Names a page in use. Whichever page had the name loses it."""
        assert self._references[page] > 0, f"page {page} is free"
        assert self._names[page] is None, f"page {page} has a name"
        former = self._by_name.get(name)
        if former is not None:
            self.forget([former])
        self._names[page], self._by_name[name] = name, page

    def forget(self, pages: Iterable[int]) -> None:
        """Takes the names of pages away: nobody can take them any more, and idle ones become free."""
        for page in pages:
            name = self._names[page]
            if name is not None:
                self._names[page] = None
                del self._by_name[name]
                if page in self._idle:
                    del self._idle[page]
                    self._to_pool(page)

    def forget_all(self) -> None:
        """Takes every name and every mark away: the caches that the pages stood for are gone (a new verifier)."""
        self.forget(list(self._by_name.values()))
        self.clear_draft_context()

    def mark_draft_context(self, page: int) -> None:
        """Every position of the page has been ingested, as the drafter acknowledged."""
        self._has_draft_context[page] = True

    def has_draft_context(self, pages: Iterable[int]) -> bool:
        """Whether every one of `pages` is marked."""
        return all(self._has_draft_context[page] for page in pages)

    def clear_draft_context(self) -> None:
        """Takes all marks away: the draft cache is gone (a new drafter)."""
        self._has_draft_context = [False] * self.num_pages

    def _to_pool(self, page: int) -> None:
        self._has_draft_context[page] = False
        self._free.append(page)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless free and idle pages and the holders' page lists account for every reference, and
        names and pages for each other."""
        held = Counter(page for pages in holders for page in pages)
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        for page, references in enumerate(self._references):
            assert held[page] == references, f"page {page}: {references} references, {held[page]} holders"
        assert len(self._free) + len(self._idle) + len(held) == self.num_pages, "a page is neither free nor held"
        assert not any(self._has_draft_context[page] for page in self._free), "a free page is marked as ingested"
        assert not any(self._names[page] for page in self._free), "a free page has a name"
        assert all(self._names[page] for page in self._idle), "an idle page has no name"
        named = {name: page for page, name in enumerate(self._names) if name is not None}
        assert named == self._by_name, "names and pages do not match"
