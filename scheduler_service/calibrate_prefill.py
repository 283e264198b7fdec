"""Measures what prefill costs, at start, with real steps on a borrowed slot and pages: half a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from kernels.sampling import Regime, SlotSampling
from scheduler_service.batch import Batch
from scheduler_service.executor_types import StepCall
from scheduler_service.executors import VerifierClient
from scheduler_service.prefill_limit import PrefillCosts

_SIZES = (8, 32, 128)
_CONTEXT_LEN = 1024
_CONTEXT_ROWS = 32
"""Rows of the chunk that is measured behind a context."""
_NUM_REPEATS = 3
_TOKEN = 1
"""Any token will do; nor does it matter what the pages of the context hold."""


def measure_prefill(batch: Batch, verifier: VerifierClient, step_ids: Iterator[int]) -> PrefillCosts:
    """Medians of interleaved repeats. The batch must be idle."""
    limits = batch.limits
    room = min(limits.max_model_len, limits.num_pages * limits.page_size)
    sizes = [size for size in _SIZES if size <= min(limits.max_chunk, room)] or [1]
    context_rows = min(_CONTEXT_ROWS, sizes[-1])
    context_len = min(_CONTEXT_LEN, room - context_rows)
    pages = batch.pages.allocate(batch.pages.pages_for(max(sizes[-1], context_len + context_rows)))
    batch.verifier_updates.admit(0, SlotSampling(Regime.GREEDY))
    batch.verifier_updates.set_pages(0, 0, pages)

    def timed(start: int, num_tokens: int, *, emits: bool = False) -> float:
        call = StepCall(
            step_id=next(step_ids),
            updates=batch.verifier_updates.take(),
            row_slots=[0],
            row_starts=[start],
            row_num_tokens=[num_tokens],
            row_num_drafts=[0],
            row_emits=[emits],
            row_rounds=[0],
            token_ids=[_TOKEN] * num_tokens,
        )
        started = time.perf_counter_ns()
        verifier.send(call)
        verifier.receive()
        return float(time.perf_counter_ns() - started)

    decode: list[float] = []
    behind: list[float] = []
    chunks: dict[int, list[float]] = {size: [] for size in sizes}
    alone = chunks.setdefault(context_rows, [])
    try:
        timed(0, 1, emits=True)
        for _ in range(_NUM_REPEATS):
            decode.append(timed(0, 1, emits=True))
            for size, times in chunks.items():
                times.append(timed(0, size))
            if context_len > 0:
                behind.append(timed(context_len, context_rows))
    finally:
        batch.pages.free(pages)
        batch.verifier_updates.release(0)
    context_ns = 0.0
    if behind:
        context_ns = max(0.0, median(behind) - median(alone)) / (context_rows * context_len)
    return PrefillCosts(median(decode), {size: median(times) for size, times in chunks.items()}, context_ns)
