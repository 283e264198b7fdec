"""The masks arena: which tokens each masked row of a step may emit, for the verifier to read.

Row k of a slot's part is for the k-th token after the anchor. Behind a draft that the form forbids masks allow
everything, behind the end of an answer something: the verifier rejects that draft, or the answer ends there, and what
follows does not count. So how many drafts are verified does not depend on which tokens were drafted (design 5.7).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher

from scheduler_service.grammar.matcher import MatcherError
from scheduler_service.step_plan import PlannedRow
from service_kit.cpu import available_cores
from service_kit.handoff import Arena, ArenaSpec

_MAX_THREADS = 4
_WORD_BITS = 32


class TokenMasks:
    """Owner of the arena. Its masks are used within one step, so no step with masks may run when they are written."""

    def __init__(self, session: int, num_slots: int, block_size: int, vocab_size: int) -> None:
        """Makes the arena. Raises OSError in words if shared memory cannot hold it."""
        shape = (num_slots, block_size + 1, -(-vocab_size // _WORD_BITS))
        self._session = session
        self._arena = Arena.create(ArenaSpec(shape, np.uint32, 1, session, session))
        self._executor: LLExecutor | None = None  # its threads are for those who need them

    @property
    def name(self) -> str:
        """Name of the arena."""
        return self._arena.name

    def fill(self, step_id: int, rows: Sequence[PlannedRow]) -> dict[int, Exception]:
        """Writes the masks of `rows`, which emit and have matchers; returns those that cannot be served, by index."""
        if self._executor is None:
            self._executor = LLExecutor(num_threads=min(_MAX_THREADS, available_cores()))
        _, rows_per_slot, num_words = self._arena.spec.shape
        alone: list[tuple[LLMatcher, int]] = []
        with_drafts: list[tuple[LLMatcher, int, list[int]]] = []
        for row in rows:
            assert row.sequence.matcher is not None
            state, slot = row.sequence.matcher.state, row.sequence.slot
            self._arena.rows[slot, : 1 + len(row.drafts)] = 0xFFFFFFFF
            if row.drafts:
                with_drafts.append((state, slot * rows_per_slot, list(row.drafts)))
            else:
                alone.append((state, slot * rows_per_slot))
        masks = self._arena.rows
        place = (masks.ctypes.data, num_words * masks.itemsize, len(masks) * rows_per_slot)
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *place)
        if with_drafts:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *place)
        failed: dict[int, Exception] = {}
        for index, row in enumerate(rows):
            assert row.sequence.matcher is not None
            try:
                row.sequence.matcher.raise_error()
            except MatcherError as error:
                failed[index] = error
                continue
            first_position = row.start + row.num_tokens
            self._arena.stamps[row.sequence.slot] = (self._session, step_id, row.sequence.slot, first_position)
        return failed

    def close(self) -> None:
        """Gives back shared memory."""
        self._arena.close()
