"""Calls of a given shape on borrowed slots and pages of an idle engine.

A context is computed and ingested once and shared by all slots, so that preparing the largest batch costs no more than
the smallest. All calls go over the same positions behind it. Greedy: no draft distributions are written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kernels.sampling import Regime, SlotSampling
from scheduler_service.batch import Batch
from scheduler_service.executor_types import DraftCall, StepCall
from scheduler_service.executors import DrafterClient, VerifierClient
from service_kit.errors import ConfigurationError

NUM_INGESTED = 2
"""Positions that a drafted row ingests with a Draft call: about what a step commits."""
_TOKEN = 1
"""Any token will do."""


class Probe:
    """Issues calls of a given shape over slots that share one context."""

    def __init__(
        self,
        batch: Batch,
        verifier: VerifierClient,
        drafter: DrafterClient,
        step_ids: Iterator[int],
        context_lens: Sequence[int],
    ) -> None:
        self._batch, self._verifier, self._drafter, self._step_ids = batch, verifier, drafter, step_ids
        self._round = self._last_step_id = self._context_len = 0
        limits = batch.limits
        self.row_len = limits.block_size + 1
        room = self.row_len + NUM_INGESTED
        tail = batch.pages.pages_for(room)
        self.num_slots = min(limits.max_num_seqs, (limits.num_pages - 1) // tail)
        self.max_tokens = min(limits.max_batch_tokens, self.num_slots * self.row_len)
        longest = min(limits.max_model_len - room, (limits.num_pages - self.num_slots * tail) * limits.page_size)
        whole = [min(length, longest) // limits.page_size * limits.page_size for length in context_lens]
        self.context_lens = sorted({length for length in whole if length > 0})  # whole pages can be shared
        if not self.context_lens or self.num_slots < 1:
            raise ConfigurationError(
                f"verify_mode compact measures what steps cost on a context of {limits.page_size} tokens and a block: "
                f"raise max_model_len to {limits.page_size + room} and kv_memory to hold as much, or use static"
            )
        self._context_pages = batch.pages.allocate(self.context_lens[-1] // limits.page_size)
        self._own_pages = [batch.pages.allocate(tail) for _ in range(self.num_slots)]
        for slot in range(self.num_slots):
            for updates in (batch.verifier_updates, batch.drafter_updates):
                updates.admit(slot, SlotSampling(Regime.GREEDY))

    def prepare(self) -> None:
        """Computes and ingests the context; first calls warm both executors up."""
        self._set_context(self.context_lens[-1])
        chunk = min(self._batch.limits.max_chunk, self._batch.limits.max_batch_tokens)
        for start in range(0, self._context_len, chunk):
            count = min(chunk, self._context_len - start)
            self._step([count], start=start, emits=False)
            self._draft([], ingests=[0], start=start, count=count, block_len=1)
        self._step([1], start=self._context_len, emits=True)
        self._draft([0], ingests=[], start=self._context_len, count=0, block_len=self._batch.limits.block_size)

    def use_context(self, context_len: int) -> None:
        """Lets rows begin behind so many positions; a call that is not timed carries the page tables."""
        if context_len != self._context_len:
            self._set_context(context_len)
            self._step([1], start=context_len, emits=True)
            self._draft([0], ingests=[], start=context_len, count=0, block_len=self._batch.limits.block_size)

    def _set_context(self, context_len: int) -> None:
        self._context_len = context_len
        shared = self._context_pages[: context_len // self._batch.limits.page_size]
        for slot, own in enumerate(self._own_pages):
            for updates in (self._batch.verifier_updates, self._batch.drafter_updates):
                updates.set_pages(slot, 0, shared + own)

    def key_of(self, num_rows: int, num_tokens: int, context_len: int) -> tuple[int, int, float]:
        """R, M and C of a step."""
        own = sum(length * (length - 1) // 2 for length in _row_lens(num_rows, num_tokens))
        return num_rows, num_tokens, float(num_tokens * context_len + own)

    def timed_step(self, num_rows: int, num_tokens: int) -> float:
        """Nanoseconds of one `Step`, its rows as long as each other."""
        started = time.perf_counter_ns()
        self._step(_row_lens(num_rows, num_tokens), start=self._context_len, emits=True)
        return float(time.perf_counter_ns() - started)

    def timed_draft(self, num_rows: int, num_tokens: int, block_len: int) -> float:
        """Nanoseconds of one `Draft` behind that step: ingests positions that every row has computed, then drafts."""
        count = min(num_tokens // num_rows, NUM_INGESTED)
        slots = list(range(num_rows))
        started = time.perf_counter_ns()
        self._draft(slots, ingests=slots, start=self._context_len, count=count, block_len=block_len)
        return float(time.perf_counter_ns() - started)

    def _step(self, row_lens: list[int], *, start: int, emits: bool) -> None:
        self._last_step_id = next(self._step_ids)
        self._verifier.send(
            StepCall(
                step_id=self._last_step_id,
                updates=self._batch.verifier_updates.take(),
                row_slots=list(range(len(row_lens))),
                row_starts=[start] * len(row_lens),
                row_num_tokens=row_lens,
                row_num_drafts=[length - 1 if emits else 0 for length in row_lens],
                row_emits=[emits] * len(row_lens),
                row_rounds=[self._round] * len(row_lens),
                token_ids=[_TOKEN] * sum(row_lens),
            )
        )
        self._verifier.receive()

    def _draft(self, slots: list[int], *, ingests: list[int], start: int, count: int, block_len: int) -> None:
        self._round += 1
        call = DraftCall(
            step_id=next(self._step_ids),
            updates=self._batch.drafter_updates.take(),
            ingest_slots=ingests,
            ingest_starts=[start] * len(ingests),
            ingest_counts=[count] * len(ingests),
            ingest_oldest_step_ids=[self._last_step_id] * len(ingests),
            ingest_newest_step_ids=[self._last_step_id] * len(ingests),
            row_slots=slots,
            row_anchor_ids=[_TOKEN] * len(slots),
            row_anchor_positions=[start + count] * len(slots),
            row_rounds=[self._round] * len(slots),
            num_draft_tokens=block_len,
        )
        self._drafter.send(call)
        self._drafter.receive(call)

    def release(self) -> None:
        """Returns what was borrowed; the executors hear of it with the first real call."""
        self._batch.pages.free(self._context_pages + [page for own in self._own_pages for page in own])
        for slot in range(self.num_slots):
            self._batch.verifier_updates.release(slot)
            self._batch.drafter_updates.release(slot)


def _row_lens(num_rows: int, num_tokens: int) -> list[int]:
    shortest, num_longer = divmod(num_tokens, num_rows)
    return [shortest + (row < num_longer) for row in range(num_rows)]
