"""The running batch and those who wait for it: slots, pages, and what the executors are told about them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator

from scheduler_service.admission import Limits
from scheduler_service.draft_gate import DraftGate, OpenGate
from scheduler_service.pages import PageAllocator
from scheduler_service.policy import StepCosts
from scheduler_service.prefill_limit import PrefillLimit
from scheduler_service.prefix_cache import PrefixCache, PrefixCacheMode
from scheduler_service.request import Request, Sequence
from scheduler_service.slot_updates import SlotUpdates

log = logging.getLogger(__name__)


class Batch:
    """State of all live sequences. Touched by the step thread only."""

    def __init__(self, limits: Limits, prefix_cache: PrefixCacheMode = "off") -> None:
        """Empty; all slots and pages free."""
        self.limits = limits
        self.pages = PageAllocator(limits.num_pages, limits.page_size)
        self.prefix_cache = PrefixCache(self.pages, prefix_cache, is_drafting=limits.block_size > 0)
        self.verifier_updates = SlotUpdates()
        self.drafter_updates = SlotUpdates()
        self._updates = (self.verifier_updates, self.drafter_updates)[: 2 if limits.block_size else 1]
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.running: list[Sequence] = []
        """In order of admission: the last one is the newest."""
        self.closing: list[Sequence] = []
        """Ended; they hold slot and pages until the drafter has ingested their last full pages."""
        self.waiting: deque[list[Sequence]] = deque()
        """Groups that must be admitted together: the choices of a new request, or one preempted choice."""
        self.num_preemptions = 0
        self.draft_gate: DraftGate = OpenGate(limits.block_size)
        self.costs: StepCosts | None = None
        """Where steps are scheduled by what they cost."""
        self.audit_share = 0.0
        """Share of drafted rows that are audited (see `audit`)."""
        self.prefill_limit: PrefillLimit | None = None
        """None: prefill is bounded by tokens alone."""

    @property
    def num_waiting(self) -> int:
        """Choices waiting."""
        return sum(len(group) for group in self.waiting)

    def enqueue(self, request: Request) -> None:
        """Puts the choices of a new request at the end of the queue."""
        self.waiting.append([sequence for sequence in request.choices if sequence.finish_reason is None])

    def admit(self) -> Iterator[Sequence]:
        """Admits from the head of the queue while slots and pages last; yields the admitted."""
        while self.waiting and self._can_admit(self.waiting[0]):
            for sequence in self.waiting.popleft():
                sequence.slot = self.free_slots.pop()
                sequence.admitted_ns = sequence.admitted_ns or time.monotonic_ns()
                self.running.append(sequence)
                self.verifier_updates.admit(sequence.slot, sequence.sampling, sequence.target_options())
                if self.limits.block_size:
                    self.drafter_updates.admit(sequence.slot, sequence.sampling)
                    self.draft_gate.begin(sequence.slot, len(sequence.tokens) + 1)
                if not sequence.waits_for_prompt:
                    self._reuse_prefix(sequence)
                    self.reserve(sequence, len(sequence.tokens))
                yield sequence

    def _can_admit(self, group: list[Sequence]) -> bool:
        if len(group) > len(self.free_slots):
            return False
        # One page more for each running sequence: admission must not cause a preemption at once.
        needed = len(self.running)
        for sequence in group:
            num_positions = len(sequence.tokens)
            needed += self.pages.pages_for(num_positions)
            if sequence.waits_for_prompt:
                needed -= (len(sequence.request.prompt) - 1) // self.pages.page_size
            else:
                needed -= sum(not self.pages.is_idle(page) for page in self.prefix_cache.match(sequence))
        return self.pages.can_allocate(needed)

    def _reuse_prefix(self, sequence: Sequence) -> None:
        """Starts an admitted sequence behind the pages that are computed already."""
        hit = self.prefix_cache.match(sequence)
        self.prefix_cache.count(sequence, len(hit))
        self.pages.share(hit)
        self._append_pages(sequence, hit)
        sequence.computed = sequence.ingested = len(hit) * self.pages.page_size
        sequence.num_published = len(hit)

    def publish(self, sequence: Sequence) -> None:
        """Offers the full pages that the sequence has computed to others."""
        if min(sequence.computed, len(sequence.tokens)) >= (sequence.num_published + 1) * self.pages.page_size:
            sequence.num_published = self.prefix_cache.publish(sequence, sequence.num_published)

    def reserve(self, sequence: Sequence, num_positions: int) -> bool:
        """Gives the sequence pages for positions 0 ... num_positions - 1; False, changing nothing, if they run out."""
        if num_positions <= len(sequence.pages) * self.pages.page_size:
            return True
        missing = self.pages.pages_for(num_positions) - len(sequence.pages)
        if not self.pages.can_allocate(missing):
            return False
        self._append_pages(sequence, self.pages.allocate(missing))
        return True

    def reserve_or_preempt(self, sequence: Sequence, num_positions: int) -> bool:
        """Like `reserve`, but takes pages from the newest sequences; False if the sequence itself had to go."""
        while not self.reserve(sequence, num_positions):
            if self.closing:
                self.release(self.closing[-1])
                continue
            victim = next(other for other in reversed(self.running) if other.pages or other is sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def share_prompt(self, source: Sequence) -> None:
        """Gives the prompt's full pages, once `source` has computed them, to the choices that wait for them."""
        full = (len(source.request.prompt) - 1) // self.pages.page_size
        if source.computed < full * self.pages.page_size:
            return
        shared = source.pages[:full]
        for sequence in source.request.choices:
            if not (sequence.is_running and sequence.waits_for_prompt):
                continue
            self.pages.share(shared)
            self._append_pages(sequence, shared)
            sequence.waits_for_prompt = False
            sequence.num_shared_pages = sequence.num_published = full
            sequence.computed = sequence.ingested = full * self.pages.page_size

    def return_surplus(self) -> None:
        """Returns pages reserved for drafts that were not accepted, where pages are short. Call between steps.

        Elsewhere they stay with their sequences, whose next blocks need them.
        """
        num_needed = len(self.running) * (1 + self.pages.pages_for(self.limits.block_size + 1))
        if self.waiting:
            num_needed += sum(self.pages.pages_for(len(sequence.tokens)) for sequence in self.waiting[0])
        if not self.pages.can_allocate(num_needed):
            for sequence in self.running:
                self.trim_pages(sequence)

    def trim_pages(self, sequence: Sequence) -> None:
        """Returns the pages reserved for drafts that were not accepted."""
        kept = self.pages.pages_for(len(sequence.tokens))
        if kept < len(sequence.pages):
            self.pages.free(sequence.pages[kept:])
            del sequence.pages[kept:]

    def close(self, sequence: Sequence) -> None:
        """Takes a sequence out that ended as it should.

        If the drafter has not ingested its last full pages, it keeps slot and pages for one more ingest, so that a
        prompt that goes on from here finds no gap.
        """
        full = min(sequence.computed, len(sequence.tokens)) // self.pages.page_size
        has_gap = sequence.is_running and sequence.ingested < full * self.pages.page_size
        if self.prefix_cache.mode == "off" or not self.limits.block_size or sequence.context_lost or not has_gap:
            self.release(sequence)
            return
        self.running.remove(sequence)
        self.closing.append(sequence)

    def acknowledge_ingest(self, sequence: Sequence) -> None:
        """The drafter has ingested every computed position of the sequence."""
        first, last = sequence.ingested // self.pages.page_size, sequence.computed // self.pages.page_size
        sequence.ingested = sequence.computed
        if first < last:
            for page in sequence.pages[first:last]:
                self.pages.mark_draft_context(page)
            self.prefix_cache.publish(sequence, first)

    def release_closed(self) -> None:
        """Lets go of the sequences whose last ingest was tried, whatever came of it."""
        for sequence in list(self.closing):
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Takes the sequence out, running, closing or waiting: the one place where slots and pages come back."""
        if sequence.is_running:
            (self.closing if sequence in self.closing else self.running).remove(sequence)
            self.pages.free(sequence.pages)
            for updates in self._updates:
                updates.release(sequence.slot)
            self.free_slots.append(sequence.slot)
            sequence.slot, sequence.pages = -1, []
            sequence.computed = sequence.ingested = sequence.num_shared_pages = sequence.num_published = 0
            sequence.waits_for_prompt = False
            return
        for group in self.waiting:
            if sequence in group:
                group.remove(sequence)
                if not group:
                    self.waiting.remove(group)
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; to be recomputed from prompt + committed tokens. Its round stays."""
        log.info("request %r choice %d preempted: pages ran out", sequence.request.request_id, sequence.choice)
        self.release(sequence)
        self.waiting.appendleft([sequence])
        self.num_preemptions += 1

    def _append_pages(self, sequence: Sequence, pages: list[int]) -> None:
        for updates in self._updates:
            updates.set_pages(sequence.slot, len(sequence.pages), pages)
        sequence.pages += pages

    def check_integrity(self) -> None:
        """Raises AssertionError if a page or slot is leaked or owned twice. Call between steps."""
        holders = self.running + self.closing
        self.pages.check_integrity([sequence.pages for sequence in holders])
        slots = self.free_slots + [sequence.slot for sequence in holders]
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), f"slots leaked or owned twice: {sorted(slots)}"
        for group in self.waiting:
            assert group, "an empty group waits"
            assert all(not sequence.is_running and not sequence.pages for sequence in group), "a waiting choice runs"
