"""The drafts that are verified: a policy's choice, and what it is told of the step."""

from __future__ import annotations

import numpy as np

from scheduler_service.audit import audited_windows
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.counts import WindowCounts
from scheduler_service.executor_types import DraftResult
from scheduler_service.ledger import Ledger
from scheduler_service.policy import DraftedBatch, VerifyPolicy
from scheduler_service.step_plan import StepPlan


class WindowChooser:
    """Gives each drafted row the drafts it will verify."""

    def __init__(self, policy: VerifyPolicy, calibration: CalibrationMonitor | None, ledger: Ledger) -> None:
        """`calibration` corrects confidences before the policy sees them."""
        self._policy, self._calibration, self._ledger = policy, calibration, ledger

    def choose(self, plan: StepPlan, result: DraftResult, counts: WindowCounts) -> None:
        """Fills in the rows of `plan` what the drafter answered."""
        drafted, rows = plan.drafted, plan.rows
        confidences = result.confidences
        if self._calibration is not None:
            confidences = self._calibration.corrected(confidences, [row.sequence.sampling.regime for row in drafted])
        plan.draft, plan.confidences = result, confidences
        max_drafts = np.array([row.max_drafts for row in drafted], np.intp)
        is_audit = [row.is_audit for row in drafted]
        windows = audited_windows(
            self._policy,
            DraftedBatch(
                confidences=confidences,
                max_drafts=max_drafts,
                num_emitting=sum([row.emits for row in rows]),
                num_tokens=sum([row.num_tokens for row in rows]),
                row_keys=[row.sequence for row in drafted],
                contexts=np.array([row.start + 1 for row in drafted], np.float64),
                num_rows=len(rows),
                num_context=float(sum([row.num_context for row in rows])),
                row_weights=np.array([row.sequence.request.priority for row in drafted], np.float64),
                max_budget=plan.max_budget,
            ),
            is_audit,
        )
        counts.add(windows.verify_lens)
        num_slots, token_ids = plan.decision.num_slots, list(result.token_ids)
        ends = (np.arange(len(drafted)) * num_slots + np.minimum(max_drafts, num_slots)).tolist()
        for index, (row, end) in enumerate(zip(drafted, ends, strict=True)):
            if row.max_drafts:
                sequence, block = row.sequence, token_ids[index * num_slots : end]
                row.block_ids, row.drafts = block, block[: windows.verify_lens[index]]
                row.commit_len = windows.commit_lens[index]
                sequence.num_drafted += num_slots
                sequence.num_drafted_steps += 1
        ledger, num_blocks = self._ledger, int(np.count_nonzero(max_drafts))
        ledger.num_invalid_confidences += windows.num_invalid
        ledger.num_drafted_rows += num_blocks
        ledger.num_drafted += num_blocks * num_slots
        audited = [len(row.drafts) for row in drafted if row.is_audit and row.max_drafts]
        ledger.num_audited_rounds += len(audited)
        ledger.num_audit_drafts += sum(audited)
