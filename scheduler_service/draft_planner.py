"""Which rows are drafted, and how many drafts each may carry: settled before the Draft call, from history alone."""

from __future__ import annotations

from typing import NamedTuple

from scheduler_service.audit import is_audited
from scheduler_service.batch import Batch
from scheduler_service.draft_gate import NOTHING, Candidate, DraftDecision, StepShape
from scheduler_service.latency import TimedRow, draft_budget
from scheduler_service.policy import StepWork
from scheduler_service.request import Sequence
from scheduler_service.step_plan import PlannedRow, StepPlan, step_shape


class Decided(NamedTuple):
    """What a step drafts."""

    rows: list[PlannedRow]
    """Decode rows that may be drafted."""
    candidates: list[Candidate]
    """Those rows, as the gate sees them."""
    decision: DraftDecision
    max_budget: int | None
    """Most drafts verified, by latency targets; None: no bound."""


def decide(batch: Batch, decoding: list[PlannedRow], num_prefill: int) -> Decided:
    """What the gate would draft beside `num_prefill` prefill tokens, within the latency targets. Changes nothing."""
    rows, candidates = _candidates(batch, decoding)
    shape = step_shape(decoding, num_prefill)
    decision = batch.draft_gate.decide(shape, candidates)
    return Decided(rows, candidates, *_cap(batch, decoding, shape, candidates, decision))


def plan_drafts(batch: Batch, plan: StepPlan, decoding: list[PlannedRow], budget: int, num_prefill: int) -> int:
    """Sets what is drafted, and how many drafts each of those rows may carry; returns their sum."""
    rows, candidates, plan.decision, plan.max_budget = decide(batch, decoding, num_prefill)
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
    batch: Batch, decoding: list[PlannedRow], shape: StepShape, candidates: list[Candidate], decision: DraftDecision
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
