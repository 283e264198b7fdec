"""Which rows a step runs: decode rows, prefill chunks, the drafts each row may carry, and the pages for all of it.

Everything here follows from history (tokens committed, pages free), never from the drafts or confidences of the step
it plans: so it cannot bias what is generated (design 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.token_scores import TokenScore
from scheduler_service.audit import is_audited
from scheduler_service.batch import Batch
from scheduler_service.draft_gate import NOTHING, Candidate, DraftDecision, StepShape
from scheduler_service.latency import TimedRow, draft_budget
from scheduler_service.policy import StepWork
from scheduler_service.request import Sequence


class DraftedBlock(NamedTuple):
    """A row's drafts, as far as its limit allows to verify them."""

    draft_ids: list[int]
    confidences: npt.NDArray[np.float32]
    """[drafts]: as the drafter gave them."""
    draft_probs: npt.NDArray[np.float32]
    """[drafts]: probability with which each was sampled; NaN where the row does not sample."""


@dataclass
class PlannedRow:
    """One row of the step: `num_tokens` tokens from position `start`, then up to `max_drafts` drafts."""

    sequence: Sequence
    start: int
    num_tokens: int
    emits: bool
    is_chained: bool = False
    """Whether the row's one token is the one that the step in flight emits for the sequence."""
    max_drafts: int = 0
    drafts: list[int] = field(default_factory=list)
    """Drafts to verify; filled in between planning and the verifier's call."""
    is_audit: bool = False
    """Whether the whole block is verified for its own sake, whatever the confidences (see `audit`)."""
    commit_len: int = 0
    """Most of them that may be committed."""
    block: DraftedBlock | None = None
    """The whole block; None until it is drafted."""
    scores: list[TokenScore] = field(default_factory=list)
    """Of the tokens that the verifier emitted, where the request asks for them."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the prompt tokens from position `start` + 1 on."""

    @property
    def num_context(self) -> int:
        """Positions of context that its tokens read together, drafts left out."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2

    @property
    def is_current(self) -> bool:
        """Whether the row still goes on where its sequence stands. The result of a chained step's row is void if the
        step before it ended the sequence or failed the row."""
        return self.sequence.finish_reason is None and self.sequence.computed == self.start


@dataclass
class StepPlan:
    """The rows of a step, and how far each slot's features must be ingested first."""

    rows: list[PlannedRow] = field(default_factory=list)
    ingests: list[Sequence] = field(default_factory=list)
    """Sequences whose computed positions the drafter ingests first."""
    num_ingested: int = 0
    """Positions of theirs."""
    decision: DraftDecision = NOTHING
    max_budget: int | None = None
    """Most drafts verified, by latency targets; None: no bound."""
    drafted: list[PlannedRow] = field(default_factory=list)
    """Rows that are drafted: those of `decision`, in its order, for which there is room."""


def plan_step(batch: Batch) -> StepPlan:
    """Plans one step, oldest sequence first. May preempt the newest ones when pages run out."""
    plan = StepPlan()
    decoding: list[PlannedRow] = []
    prefilling: list[Sequence] = []
    for sequence in list(batch.running):
        if not sequence.is_running:
            continue  # preempted by an older one in this very loop
        if _waits(sequence) or not batch.reserve_or_preempt(sequence, len(sequence.tokens)):
            continue
        if sequence.is_decoding:
            decoding.append(PlannedRow(sequence, sequence.computed, 1, emits=True))
        else:
            prefilling.append(sequence)
    budget = batch.limits.max_batch_tokens - len(decoding)
    # Drafts must not starve prefill: a quarter of the step is kept for it when there is any.
    to_prefill = sum(len(sequence.tokens) - sequence.computed for sequence in prefilling)
    for_prefill = min(to_prefill, batch.limits.max_batch_tokens // 4)
    if batch.limits.block_size:
        budget -= _plan_drafts(batch, plan, decoding, budget - for_prefill, for_prefill)
    chunks = [(sequence, sequence.computed) for sequence in prefilling]
    plan.rows = decoding + _plan_chunks(batch, chunks, budget, is_decoding=bool(decoding))
    if batch.limits.block_size:
        plan.ingests = _plan_ingests(batch, plan.rows)
        plan.num_ingested = sum(sequence.computed - sequence.ingested for sequence in plan.ingests)
    return plan


def plan_chained(batch: Batch, in_flight: list[PlannedRow]) -> list[PlannedRow]:
    """Plans the step after the one in flight, before its result is known; no row if that takes the result.

    It takes the result where anything is to be drafted or ingested, or where pages have run out. A sequence that is
    going to end with the step in flight, because its length is reached, gets no row; one that may end by a token gets a
    row in vain.
    """
    if any(row.drafts for row in in_flight):
        return []  # where its rows end is not known
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
        _, candidates = _candidates(batch, decoding)
        decision = batch.draft_gate.decide(step_shape(decoding, num_prefill), candidates)
        if _cap(batch, decoding, num_prefill, candidates, decision)[0].rows:
            return []
        if any(_would_overwrite(batch, row) for row in rows) or _plan_ingests(batch, rows):
            return []
    return rows


def step_shape(decoding: list[PlannedRow], num_prefill: int) -> StepShape:
    """The step as the draft gate sees it, with `num_prefill` prefill tokens beside the decode rows."""
    context = float(sum(row.num_context for row in decoding))
    num_rows = len(decoding)
    return StepShape(num_rows + bool(num_prefill), num_rows + num_prefill, context, num_rows, context)


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


def _plan_drafts(batch: Batch, plan: StepPlan, decoding: list[PlannedRow], budget: int, num_prefill: int) -> int:
    """Sets what is drafted, and how many drafts each of those rows may carry; returns their sum."""
    rows, candidates = _candidates(batch, decoding)
    decision = batch.draft_gate.decide(step_shape(decoding, num_prefill), candidates)
    plan.decision, plan.max_budget = _cap(batch, decoding, num_prefill, candidates, decision)
    for row in decoding:
        row.sequence.is_plain_once = False
    total = 0
    num_rows = len(plan.decision.rows)
    for index, candidate in enumerate(plan.decision.rows):
        row = rows[candidate]
        sequence = row.sequence
        wanted = min(plan.decision.num_slots, candidates[candidate].max_drafts, (budget - total) // (num_rows - index))
        held = len(sequence.pages) * batch.pages.page_size - len(sequence.tokens)
        if wanted > held and not batch.reserve(sequence, len(sequence.tokens) + wanted):
            wanted = held  # drafts are worth no preemption
        row.max_drafts = max(0, wanted)
        total += row.max_drafts
        if row.max_drafts:
            plan.drafted.append(row)
            # Not where a latency target bounds the step. The round is that of the Draft call to come.
            row.is_audit = plan.max_budget is None and is_audited(
                sequence.request.request_id, sequence.choice, sequence.round + 1, batch.audit_share
            )
    batch.draft_gate.drafting(candidates, plan.decision)
    return total


def _cap(
    batch: Batch, decoding: list[PlannedRow], num_prefill: int, candidates: list[Candidate], decision: DraftDecision
) -> tuple[DraftDecision, int | None]:
    """What is drafted under the latency targets of all decode rows, and how many drafts may be verified."""
    if batch.costs is None or not decision.rows or all(row.sequence.request.target_ns is None for row in decoding):
        return decision, None
    drafted = {}
    for index in decision.rows:
        history, _, max_drafts = candidates[index]
        if history is not None:
            drafted[id(history)] = history.expectation.accepted[min(decision.num_slots, max_drafts)]
    timed = [
        TimedRow(row.sequence.request.target_ns, 1.0 + drafted.get(id(row.sequence.history), 0.0))
        for row in decoding
        if row.sequence.request.target_ns is not None
    ]
    shape = step_shape(decoding, num_prefill)
    work = StepWork(shape.num_rows, len(decision.rows), shape.num_tokens, shape.num_context, decision.num_slots)
    num_drafts = len(decision.rows) * decision.num_slots
    budget = draft_budget(batch.costs, work, timed, num_drafts, max(row.start for row in decoding) + 1)
    return (NOTHING, None) if budget == 0 else (decision, budget)


def _candidates(batch: Batch, decoding: list[PlannedRow]) -> tuple[list[PlannedRow], list[Candidate]]:
    """Decode rows that may be drafted."""
    rows, candidates = [], []
    for row in decoding:
        sequence = row.sequence
        # max_tokens is clamped to the context at admission, so the row ends inside max_model_len as well.
        max_drafts = min(batch.limits.block_size, sequence.num_remaining - row.is_chained - 1)
        if sequence.request.max_draft_tokens is not None:
            max_drafts = min(max_drafts, sequence.request.max_draft_tokens)
        if max_drafts > 0 and _can_draft(batch, sequence):
            if sequence.history is None:
                sequence.history = batch.draft_gate.new_history(row.start + 1)
            rows.append(row)
            candidates.append(Candidate(sequence.history, row.start + 1, max_drafts))
    return rows, candidates


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


def _can_draft(batch: Batch, sequence: Sequence) -> bool:
    """Whether the draft context will be complete once this step's ingests are done."""
    if sequence.is_plain_once or sequence.context_lost:
        return False
    shared = sequence.pages[: sequence.num_shared_pages]
    if batch.pages.has_draft_context(shared):
        return True
    source = sequence.request.prompt_source
    if source is None or not source.is_running or source.context_lost:
        sequence.context_lost = "the shared pages of the prompt have no draft context"
    return False
