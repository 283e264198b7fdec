"""Reuse of computed prefixes: names of full pages by content, and which of them a sequence may start from.

The *name* of page i of a sequence is a hash over the name of page i - 1 and the tokens of the page; that of page 0 is
chained to the isolation key. So equal names mean equal tokens from position 0 on, of callers who may share. K/V of a
position depends on the tokens up to it alone and, bit for bit, not on what ran beside it, hence a page can stand in for
one computed anew. Only committed positions are named, and full pages only: a named page is never written again.

For drafting, a prefix is of use as far as the drafter has ingested it. A hit ends before the first page without draft
context; from there on prefill recomputes into fresh pages, which take over the names once they are ingested.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Literal

from scheduler_service.pages import PageAllocator
from scheduler_service.request import Sequence

PrefixCacheMode = Literal["off", "isolated", "shared"]
"""off: nothing is reused. isolated: among requests of one isolation key. shared: among all requests."""


class PrefixCache:
    """The index of reusable pages. Touched by the step thread only."""

    def __init__(self, pages: PageAllocator, mode: PrefixCacheMode, *, is_drafting: bool) -> None:
        """`is_drafting`: whether a prefix without draft context would keep a sequence from being drafted."""
        self._pages, self.mode, self._is_drafting = pages, mode, is_drafting
        self.num_queries = self.num_hits = 0
        """Prompt tokens looked up, and found."""

    def match(self, sequence: Sequence) -> list[int]:
        """Pages that hold the sequence's first positions; never the last token's, which has to be computed to emit."""
        hit: list[int] = []
        if self.mode == "off" or not sequence.request.reuses_prefix:
            return hit
        needs_draft_context = self._is_drafting and not sequence.context_lost
        for name in self._names(sequence, (len(sequence.tokens) - 1) // self._pages.page_size):
            page = self._pages.find(name)
            if page is None or (needs_draft_context and not self._pages.has_draft_context([page])):
                break
            hit.append(page)
        return hit

    def count(self, sequence: Sequence, num_hit_pages: int) -> None:
        """Counts a lookup of the request's prompt; those after a preemption, and of further choices, do not count."""
        request = sequence.request
        if self.mode == "off" or not request.reuses_prefix or request.num_cached_tokens is not None:
            return
        request.num_cached_tokens = num_hit_pages * self._pages.page_size
        self.num_queries += len(request.prompt)
        self.num_hits += request.num_cached_tokens

    def publish(self, sequence: Sequence, first: int) -> int:
        """Names the sequence's full pages from index `first` on; returns how many are full.

        Where another page has the name already, the one with draft context keeps it.
        """
        if self.mode == "off":
            return 0
        pages = self._pages
        num_full = min(sequence.computed, len(sequence.tokens)) // pages.page_size
        if num_full > first:
            names = self._names(sequence, num_full)
            for page, name in zip(sequence.pages[first:num_full], names[first:num_full], strict=True):
                known = pages.find(name)
                if known is None or (pages.has_draft_context([page]) and not pages.has_draft_context([known])):
                    pages.set_name(page, name)
        return num_full

    def _names(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the first `count` pages, all of whose tokens are committed."""
        names, size = sequence.page_names, self._pages.page_size
        while len(names) < count:
            start = len(names) * size
            chained = names[-1] if names else self._root(sequence)
            tokens = array("I", sequence.tokens[start : start + size]).tobytes()
            names.append(hashlib.blake2b(tokens, key=chained, digest_size=32).digest())
        return names[:count]

    def _root(self, sequence: Sequence) -> bytes:
        key = sequence.request.isolation_key if self.mode == "isolated" else b""
        return hashlib.blake2b(key, digest_size=32, person=b"prefix root").digest()
