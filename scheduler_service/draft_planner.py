"""Which rows are drafted, and how many drafts each may carry: settled before the Draft call, from history alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler_service.audit import are_audited
from scheduler_service.batch import Batch
from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, StepShape
from scheduler_service.latency import TimedRows, draft_budget
from scheduler_service.policy import StepWork
from scheduler_service.request import Sequence
from scheduler_service.step_plan import PlannedRow, StepPlan, step_shape


class Decided(NamedTuple):
    """What a step drafts."""

    able: list[int]
    """Decode rows that may be drafted."""
    candidates: Candidates
    """Those rows, as the gate sees them."""
    decision: DraftDecision
    max_budget: int | None
    """Most drafts verified, by latency targets; None: no bound."""


def decide(batch: Batch, decoding: list[PlannedRow], num_prefill: int) -> Decided:
    """What the gate would draft beside `num_prefill` prefill tokens, within the latency targets. Changes nothing."""
    able, candidates = _candidates(batch, decoding)
    shape = step_shape(decoding, num_prefill)
    decision = batch.draft_gate.decide(shape, candidates)
    return Decided(able, candidates, *_cap(batch, decoding, shape, able, candidates, decision))


def carry_out(batch: Batch, plan: StepPlan) -> None:
    """What follows from the plan and no call waits for: the gate is told what is drafted, audits are drawn."""
    if plan.candidates is not None:
        batch.draft_gate.drafting(plan.candidates, plan.decision)
    if batch.audit_share and plan.max_budget is None:  # not where a latency target bounds the step
        keys = [row.sequence.audit_key for row in plan.drafted]
        rounds = [row.sequence.round for row in plan.drafted]
        for index in np.flatnonzero(are_audited(keys, rounds, batch.audit_share)).tolist():
            plan.drafted[index].is_audit = True


def look_ahead(batch: Batch, in_flight: list[PlannedRow]) -> None:
    """Lets the gate consider the step after one in flight that drafts: its rows will be a token further at least."""
    decoding = [
        PlannedRow(row.sequence, row.start + row.num_tokens, 1, emits=True, is_chained=True)
        for row in in_flight
        if row.emits and row.sequence.num_remaining > 1
    ]
    num_left = sum(len(sequence.tokens) - 1 - sequence.computed for sequence in batch.running)
    num_left -= sum(row.num_tokens - row.emits for row in in_flight)
    num_prefill = min(max(0, num_left), batch.limits.max_batch_tokens // 4)
    batch.draft_gate.look_ahead(step_shape(decoding, num_prefill), _candidates(batch, decoding)[1])


def plan_drafts(batch: Batch, plan: StepPlan, decoding: list[PlannedRow], budget: int, num_prefill: int) -> int:
    """Sets what is drafted, and how many drafts each of those rows may carry; returns their sum."""
    able, candidates, plan.decision, plan.max_budget = decide(batch, decoding, num_prefill)
    plan.candidates = candidates
    for row in decoding:
        row.sequence.is_plain_once = False
    total, page_size = 0, batch.pages.page_size
    num_rows, num_slots, limits = len(plan.decision.rows), plan.decision.num_slots, candidates.max_drafts.tolist()
    for index, candidate in enumerate(plan.decision.rows):
        row = decoding[able[candidate]]
        sequence = row.sequence
        wanted = min(num_slots, limits[candidate], (budget - total) // (num_rows - index))
        num_tokens = len(sequence.tokens)
        held = len(sequence.pages) * page_size - num_tokens
        if wanted > held and not batch.reserve(sequence, num_tokens + wanted):
            wanted = held  # drafts are worth no preemption
        if wanted > 0:
            row.max_drafts = wanted
            total += wanted
            plan.drafted.append(row)
    return total


def _cap(
    batch: Batch,
    decoding: list[PlannedRow],
    shape: StepShape,
    able: list[int],
    candidates: Candidates,
    decision: DraftDecision,
) -> tuple[DraftDecision, int | None]:
    """What is drafted under the latency targets of all decode rows, and how many drafts may be verified."""
    if batch.costs is None or not decision.rows or all(row.sequence.request.target_ns is None for row in decoding):
        return decision, None
    requests = [row.sequence.request for row in decoding]
    drafted = np.array(able, np.intp)[decision.rows]
    rows = TimedRows(
        np.array([request.target_ns or np.inf for request in requests]),
        drafted,
        batch.draft_gate.survivals(candidates)[decision.rows, : decision.num_slots],
        np.array([requests[index].priority for index in drafted]),
    )
    work = StepWork(shape.num_rows, drafted.size, shape.num_tokens, shape.num_context, decision.num_slots)
    budget = draft_budget(batch.costs, work, rows, max(row.start for row in decoding) + 1)
    return (NOTHING, None) if budget == 0 else (decision, budget)


def _candidates(batch: Batch, decoding: list[PlannedRow]) -> tuple[list[int], Candidates]:
    """Decode rows that may be drafted."""
    able, slots, context_lens, limits = [], [], [], []
    block_size = batch.limits.block_size
    for index, row in enumerate(decoding):
        sequence = row.sequence
        most = sequence.request.max_draft_tokens
        # max_len is clamped to the context at admission, so the row ends inside max_model_len as well.
        room = sequence.max_len - len(sequence.tokens) - row.is_chained - 1
        limit = min(room, block_size if most is None else min(most, block_size))
        if limit <= 0 or sequence.is_plain_once or sequence.context_lost:
            continue
        if sequence.num_shared_pages and not _has_shared_context(batch, sequence):
            continue
        able.append(index)
        slots.append(sequence.slot)
        context_lens.append(row.start + 1)
        limits.append(limit)
    arrays = [np.array(each, np.intp) for each in (slots, context_lens, limits)]
    return able, Candidates(*arrays)


def _has_shared_context(batch: Batch, sequence: Sequence) -> bool:
    """Whether the draft context of its shared pages will be complete once this step's ingests are done."""
    if batch.pages.has_draft_context(sequence.pages[: sequence.num_shared_pages]):
        return True
    source = sequence.request.prompt_source
    if source is None or not source.is_running or source.context_lost:
        sequence.context_lost = "the shared pages of the prompt have no draft context"
    return False
