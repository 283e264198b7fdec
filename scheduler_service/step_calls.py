"""The messages of a step's two calls, as its plan says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.batch import Batch
from scheduler_service.executor_types import DraftCall, StepCall, TargetProbAsks
from scheduler_service.step_plan import StepPlan


def draft_call(
    batch: Batch,
    plan: StepPlan,
    step_id: int,
    *,
    publishes_blocks: bool,
    confidence_odds: npt.NDArray[np.float64] | None,
) -> DraftCall:
    """Ingests what is planned, then drafts; takes the updates of slots along."""
    ingests, anchors = plan.ingests, [row.sequence for row in plan.drafted]
    return DraftCall(
        step_id=step_id,
        updates=batch.drafter_updates.take(),
        ingest_slots=[sequence.slot for sequence in ingests],
        ingest_starts=[sequence.ingested for sequence in ingests],
        ingest_counts=[sequence.computed - sequence.ingested for sequence in ingests],
        ingest_oldest_step_ids=[sequence.uningested_since for sequence in ingests],
        ingest_newest_step_ids=[step_id - 1] * len(ingests),
        row_slots=[sequence.slot for sequence in anchors],
        row_anchor_ids=[sequence.tokens[-1] for sequence in anchors],
        row_anchor_positions=[len(sequence.tokens) - 1 for sequence in anchors],
        row_rounds=[sequence.round for sequence in anchors],
        num_draft_tokens=plan.decision.num_slots or batch.limits.block_size,
        publishes_blocks=publishes_blocks,
        confidence_odds=confidence_odds,
    )


def step_call(batch: Batch, plan: StepPlan, step_id: int, prob_asks: TargetProbAsks) -> StepCall:
    """Prefill, decode and verify rows of the plan; takes the updates of slots along."""
    rows = plan.rows
    token_ids: list[int] = []
    for row in rows:
        start = row.start
        token_ids += [0] if row.is_chained else row.sequence.tokens[start : start + row.num_tokens]
        token_ids += row.drafts
    are_chained, are_masked = [row.is_chained for row in rows], [row.is_masked for row in rows]
    return StepCall(
        step_id=step_id,
        updates=batch.verifier_updates.take(),
        row_slots=[row.sequence.slot for row in rows],
        row_starts=[row.start for row in rows],
        row_num_tokens=[row.num_tokens + len(row.drafts) for row in rows],
        row_num_drafts=[len(row.drafts) for row in rows],
        row_emits=[row.emits for row in rows],
        row_rounds=[row.sequence.round for row in rows],
        token_ids=token_ids,
        row_chained=are_chained if any(are_chained) else [],
        row_masked=are_masked if any(are_masked) else [],
        prob_asks=prob_asks,
        blocks=plan.block_rows(),
        verify_budget=plan.budget or 0,
    )
