"""Measures the cost table at start, with real calls on borrowed slots and pages.

The context of slot 0 is computed and ingested once and shared with every other slot, so that preparing the largest
batch costs no more than the smallest. Then `Draft` calls of D rows and `Step` calls of M token rows alternate over the
same positions. Greedy: no draft distributions are written.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from kernels.sampling import Regime, SlotSampling
from scheduler_service.batch import Batch
from scheduler_service.cost_table import CostTable
from scheduler_service.executor_types import DraftCall, StepCall
from scheduler_service.executors import DrafterClient, VerifierClient
from service_kit.errors import ConfigurationError

log = logging.getLogger(__name__)

_SMALL = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_LARGE = (24, 32, 48, 64, 96, 128, 192, 256)
_NUM_REPEATS = 3
_BUDGET_S = 2.0
"""After this long no further repeat begins, and large sizes not measured yet are extrapolated."""
_CONTEXT_LEN = 64
_TOKEN = 1
"""Any token will do."""


class _Probe:
    """Issues calls of a given size over slots that share one context."""

    def __init__(self, batch: Batch, verifier: VerifierClient, drafter: DrafterClient, step_ids: Iterator[int]) -> None:
        self._batch, self._verifier, self._drafter, self._step_ids = batch, verifier, drafter, step_ids
        self._round = 0
        limits = batch.limits
        self._row_len = limits.block_size + 1
        tail = batch.pages.pages_for(self._row_len)
        self.num_slots = min(limits.max_num_seqs, (limits.num_pages - 1) // tail)
        self.max_tokens = min(limits.max_batch_tokens, self.num_slots * self._row_len)
        longest = min(
            _CONTEXT_LEN,
            limits.max_chunk,
            limits.max_model_len - self._row_len,
            (limits.num_pages - self.num_slots * tail) * limits.page_size,
        )
        self._context_len = longest // limits.page_size * limits.page_size  # whole pages can be shared
        if self._context_len <= 0 or self.num_slots < 1:
            needed = limits.page_size + self._row_len
            raise ConfigurationError(
                f"verify_mode compact measures its cost table on a context of {limits.page_size} tokens and a block: "
                f"raise max_model_len to {needed} and max_batch_tokens to {limits.page_size} at least, or use static"
            )
        context = batch.pages.allocate(self._context_len // limits.page_size)
        self._pages = list(context)
        for slot in range(self.num_slots):
            own = batch.pages.allocate(tail)
            self._pages += own
            for updates in (batch.verifier_updates, batch.drafter_updates):
                updates.admit(slot, SlotSampling(Regime.GREEDY))
                updates.set_pages(slot, 0, context + own)

    def prepare(self) -> None:
        """Computes and ingests the context; first calls warm both executors up."""
        step_id = self._step([(self._context_len, 0)], start=0, emits=False)
        self._draft(0, ingest_step_id=step_id)
        self.step(1)
        self.draft(1)

    def step(self, num_tokens: int) -> None:
        """One `Step` of `num_tokens` rows, in verify rows of whole blocks and a rest."""
        full, rest = divmod(num_tokens, self._row_len)
        lens = [self._row_len] * full + ([rest] if rest else [])
        self._step([(length, length - 1) for length in lens], start=self._context_len, emits=True)

    def draft(self, num_rows: int) -> None:
        """One `Draft` of `num_rows` blocks."""
        self._draft(num_rows)

    def _step(self, rows: list[tuple[int, int]], *, start: int, emits: bool) -> int:
        step_id = next(self._step_ids)
        self._verifier.send(
            StepCall(
                step_id=step_id,
                updates=self._batch.verifier_updates.take(),
                row_slots=list(range(len(rows))),
                row_starts=[start] * len(rows),
                row_num_tokens=[num_tokens for num_tokens, _ in rows],
                row_num_drafts=[num_drafts for _, num_drafts in rows],
                row_emits=[emits] * len(rows),
                row_rounds=[self._round] * len(rows),
                token_ids=[_TOKEN] * sum(num_tokens for num_tokens, _ in rows),
            )
        )
        self._verifier.receive()
        return step_id

    def _draft(self, num_rows: int, *, ingest_step_id: int | None = None) -> None:
        self._round += 1
        ingest = [] if ingest_step_id is None else [ingest_step_id]
        call = DraftCall(
            step_id=next(self._step_ids),
            updates=self._batch.drafter_updates.take(),
            ingest_slots=[0] * len(ingest),
            ingest_starts=[0] * len(ingest),
            ingest_counts=[self._context_len] * len(ingest),
            ingest_oldest_step_ids=ingest,
            ingest_newest_step_ids=ingest,
            row_slots=list(range(num_rows)),
            row_anchor_ids=[_TOKEN] * num_rows,
            row_anchor_positions=[self._context_len] * num_rows,
            row_rounds=[self._round] * num_rows,
            num_draft_tokens=self._batch.limits.block_size,
        )
        self._drafter.send(call)
        self._drafter.receive(call)

    def release(self) -> None:
        """Returns what was borrowed; the executors hear of it with the first real call."""
        self._batch.pages.free(self._pages)
        for slot in range(self.num_slots):
            self._batch.verifier_updates.release(slot)
            self._batch.drafter_updates.release(slot)


def measure_costs(
    batch: Batch,
    verifier: VerifierClient,
    drafter: DrafterClient,
    step_ids: Iterator[int],
    padded_rows: Sequence[int],
) -> CostTable:
    """Medians of interleaved repeats, within about `_BUDGET_S` seconds. The batch must be idle."""
    log.info("measuring the cost of drafting and verifying")
    probe = _Probe(batch, verifier, drafter, step_ids)
    step_ns: dict[int, list[float]] = defaultdict(list)
    draft_ns: dict[int, list[float]] = defaultdict(list)
    started = time.monotonic()
    try:
        probe.prepare()
        for grid in (_SMALL, _LARGE):
            for repeat in range(_NUM_REPEATS):
                for size in grid:
                    if (repeat or grid is _LARGE) and time.monotonic() - started > _BUDGET_S:
                        break
                    if size <= probe.max_tokens:
                        step_ns[size].append(_timed(probe.step, size))
                    if size <= probe.num_slots:
                        draft_ns[size].append(_timed(probe.draft, size))
    finally:
        probe.release()
    log.info("cost measured up to %d token rows in %.1f s", max(step_ns), time.monotonic() - started)
    return CostTable.from_measurements(
        {size: median(times) for size, times in step_ns.items()},
        {size: median(times) for size, times in draft_ns.items()},
        max_tokens=batch.limits.max_batch_tokens,
        max_drafted=batch.limits.max_num_seqs,
        padded_rows=padded_rows,
    )


def _timed(call: Callable[[int], None], size: int) -> float:
    started = time.perf_counter_ns()
    call(size)
    return float(time.perf_counter_ns() - started)
