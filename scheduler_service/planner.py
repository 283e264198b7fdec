"""Which rows a step runs: decode rows, prefill chunks, the drafts each row may carry, and the pages for all of it.

Everything here follows from history (tokens committed, pages free), never from the drafts or confidences of the step
it plans: so it cannot bias what is generated (design 5.1).
"""

from __future__ import annotations

from scheduler_service.batch import Batch
from scheduler_service.draft_planner import decide, plan_drafts
from scheduler_service.request import Sequence
from scheduler_service.step_plan import PlannedRow, StepPlan


def plan_step(batch: Batch) -> StepPlan:
    """Plans one step, oldest sequence first. May preempt the newest ones when pages run out."""
    plan = StepPlan()
    decoding: list[PlannedRow] = []
    prefilling: list[Sequence] = []
    page_size = batch.pages.page_size
    for sequence in list(batch.running):
        if sequence.slot < 0:
            continue  # preempted by an older one in this very loop
        if sequence.waits_for_prompt and _waits(sequence):
            continue
        num_tokens, start = len(sequence.tokens), sequence.computed
        if num_tokens > len(sequence.pages) * page_size and not batch.reserve_or_preempt(sequence, num_tokens):
            continue
        if start == num_tokens - 1:
            decoding.append(PlannedRow(sequence, start, 1, emits=True))
        else:
            prefilling.append(sequence)
    budget = batch.limits.max_batch_tokens - len(decoding)
    # Drafts must not starve prefill: a quarter of the step is kept for it when there is any.
    to_prefill = sum(len(sequence.tokens) - sequence.computed for sequence in prefilling)
    for_prefill = min(to_prefill, batch.limits.max_batch_tokens // 4)
    if batch.limits.block_size:
        budget -= plan_drafts(batch, plan, decoding, budget - for_prefill, for_prefill)
    chunks = [(sequence, sequence.computed) for sequence in prefilling]
    plan.rows = decoding + _plan_chunks(batch, chunks, budget, is_decoding=bool(decoding))
    if batch.limits.block_size:
        plan.ingests = _plan_ingests(batch, plan.rows)
        plan.num_ingested = sum([sequence.computed - sequence.ingested for sequence in plan.ingests])
    return plan


def plan_chained(batch: Batch, in_flight: list[PlannedRow]) -> list[PlannedRow]:
    """Plans the step after the one in flight, before its result is known; no row if that takes the result.

    It takes the result where anything is to be drafted or ingested, or where pages have run out. A sequence that is
    going to end with the step in flight, because its length is reached, gets no row; one that may end by a token gets a
    row in vain.
    """
    if any(row.drafts for row in in_flight):
        return []  # where its rows end is not known
    if any(sequence.matcher is not None for sequence in batch.running):
        return []  # which tokens are allowed next is not known
    ahead = {row.sequence: row for row in in_flight}
    decoding: list[PlannedRow] = []
    prefilling: list[tuple[Sequence, int]] = []
    for sequence in batch.running:
        if _waits(sequence):
            continue
        start, num_tokens, emits = sequence.computed, len(sequence.tokens), False
        if (row := ahead.get(sequence)) is not None:
            if not row.is_current:
                continue  # it runs in vain; the sequence goes on from what is known in the step after
            start, emits = row.start + row.num_tokens, row.emits
            num_tokens += emits
        if emits and sequence.num_remaining == 1:
            continue
        if not batch.reserve(sequence, num_tokens):
            return []
        if start == num_tokens - 1:
            decoding.append(PlannedRow(sequence, start, 1, emits=True, is_chained=emits))
        else:
            prefilling.append((sequence, start))
    budget = batch.limits.max_batch_tokens - len(decoding)
    rows = decoding + _plan_chunks(batch, prefilling, budget, is_decoding=bool(decoding))
    if batch.limits.block_size:
        num_prefill = sum(row.num_tokens for row in rows) - len(decoding)
        if decide(batch, decoding, num_prefill).decision.rows:
            return []
        if any(_would_overwrite(batch, row) for row in rows) or _plan_ingests(batch, rows):
            return []
    return rows


def _plan_chunks(
    batch: Batch, prefilling: list[tuple[Sequence, int]], budget: int, *, is_decoding: bool
) -> list[PlannedRow]:
    """Prefill chunks, each from its sequence's given position: of at most `budget` tokens together and, if the step
    decodes as well, of no more time than the batch's prefill limit.

    First come, first served; but a chunk that does not end its prompt leaves a quarter to those behind, so that a short
    prompt does not wait for a long one to end, while no number of short ones takes more than that from a long one.
    """
    chunks = []
    num_rows, context_ns = 0, 0.0
    limit = batch.prefill_limit if is_decoding else None
    num_behind = sum(len(sequence.tokens) - start for sequence, start in prefilling)
    for sequence, start in prefilling:
        num_left = len(sequence.tokens) - start
        num_behind -= num_left
        count = min(num_left, batch.limits.max_chunk, budget - num_rows)
        if limit is not None:
            count = limit.max_rows(count, start, num_rows, context_ns)
        if count < num_left:
            count -= min(count // 4, num_behind)
        if limit is not None:
            context_ns += limit.context_ns(count, start)
        if count <= 0:
            break
        num_rows += count
        chunks.append(PlannedRow(sequence, start, count, emits=start + count == len(sequence.tokens)))
    return chunks


def _waits(sequence: Sequence) -> bool:
    """Whether another choice computes this one's prompt just now."""
    if sequence.waits_for_prompt and not _prompt_is_coming(sequence):
        sequence.waits_for_prompt = False
    return sequence.waits_for_prompt


def _prompt_is_coming(sequence: Sequence) -> bool:
    """Whether another choice still computes this one's prompt; if it left, this one takes its place."""
    request = sequence.request
    if request.prompt_source is not None and request.prompt_source.is_running:
        return True
    request.prompt_source = sequence
    return False


def _plan_ingests(batch: Batch, rows: list[PlannedRow]) -> list[Sequence]:
    """Sequences to ingest before `rows` run. Features wait in the ring until they are needed or would be overwritten:
    ingesting many positions at once costs little more than one."""
    ring_rows = batch.limits.feature_ring_rows
    urgent = {
        row.sequence for row in rows if row.max_drafts or _would_overwrite(batch, row) or _is_awaited(row.sequence)
    }
    urgent.update(batch.closing)
    behind = [
        sequence
        for sequence in [*batch.running, *batch.closing]
        if sequence.computed > sequence.ingested and not sequence.context_lost
    ]
    if not any(sequence in urgent for sequence in behind):
        return []
    return [each for each in behind if each in urgent or 2 * (each.computed - each.ingested) > ring_rows]


def _would_overwrite(batch: Batch, row: PlannedRow) -> bool:
    """Whether the row's features would take the place of some that the drafter has not ingested."""
    num_waiting = row.start - row.sequence.ingested
    num_written = row.num_tokens + row.max_drafts
    return not row.sequence.context_lost and num_waiting + num_written > batch.limits.feature_ring_rows


def _is_awaited(sequence: Sequence) -> bool:
    """Whether other choices of the request share prompt pages that this one has yet to ingest."""
    request = sequence.request
    return (
        len(request.choices) > 1 and sequence is request.prompt_source and sequence.ingested < len(request.prompt) - 1
    )
