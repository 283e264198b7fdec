"""The drafts that are verified: a policy's choice, and what it is told of the step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler_service.audit import audited_windows, without_audited
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.counts import WindowCounts
from scheduler_service.executor_types import DraftResult
from scheduler_service.ledger import Ledger
from scheduler_service.policy import DraftedBatch, VerifyPolicy, Windows
from scheduler_service.step_plan import StepPlan


class WindowChooser:
    """Gives each drafted row the drafts it will verify."""

    def __init__(self, policy: VerifyPolicy, calibration: CalibrationMonitor | None, ledger: Ledger) -> None:
        """`calibration` corrects confidences before the policy sees them."""
        self._policy, self._calibration, self._ledger = policy, calibration, ledger
        self._batch = DraftedBatch(np.empty((0, 0), np.float32), (), 0, 0)
        """Of the step that is drafted just now, but for its confidences."""
        self._is_audit: list[bool] = []
        self._regimes = np.empty(0, np.intp)

    def prepare(self, plan: StepPlan) -> None:
        """Does what the drafter's answer does not matter for; `choose` follows."""
        drafted, rows = plan.drafted, plan.rows
        self._is_audit = [row.is_audit for row in drafted]
        self._regimes = np.array([row.sequence.sampling.regime for row in drafted], np.intp)
        self._batch = DraftedBatch(
            confidences=np.zeros((len(drafted), plan.decision.num_slots), np.float32),
            max_drafts=np.array([row.max_drafts for row in drafted], np.intp),
            num_emitting=sum([row.emits for row in rows]),
            num_tokens=sum([row.num_tokens for row in rows]),
            row_keys=[row.sequence for row in drafted],
            contexts=np.array([row.start + 1 for row in drafted], np.intp),
            num_rows=len(rows),
            num_context=float(sum([row.num_context for row in rows])),
            row_weights=np.array([row.sequence.request.priority for row in drafted], np.float64),
            max_budget=plan.max_budget,
        )
        self._policy.prepare(without_audited(self._batch, self._is_audit))

    def choose(self, plan: StepPlan, result: DraftResult) -> None:
        """Fills in the rows of `plan` what the drafter answered. To be counted when there is time (`count`)."""
        drafted, confidences = plan.drafted, result.confidences
        if self._calibration is not None:
            confidences = self._calibration.corrected(confidences, self._regimes)
        plan.draft, plan.confidences = result, confidences
        if lost := [row for row in drafted if row.sequence.context_lost]:
            for row in lost:
                row.max_drafts = 0  # its rows of this reply are void
            self.prepare(plan)
        windows = audited_windows(self._policy, replace(self._batch, confidences=confidences), self._is_audit)
        plan.windows = windows
        first, num_slots, token_ids = 0, plan.decision.num_slots, list(result.token_ids)
        for row, verify_len, commit_len in zip(drafted, windows.verify_lens, windows.commit_lens, strict=True):
            if row.max_drafts:
                row.block_ids = block = token_ids[first : first + row.max_drafts]
                row.drafts, row.commit_len = block[:verify_len], commit_len
            first += num_slots

    def count(self, plan: StepPlan, windows: Windows, counts: WindowCounts) -> None:
        """Counts what `choose` did, which put `windows` into the plan."""
        counts.add(windows.verify_lens)
        num_slots, blocks = plan.decision.num_slots, [row for row in plan.drafted if row.max_drafts]
        for row in blocks:
            row.sequence.num_drafted += num_slots
            row.sequence.num_drafted_steps += 1
        ledger = self._ledger
        ledger.num_invalid_confidences += windows.num_invalid
        ledger.num_drafted_rows += len(blocks)
        ledger.num_drafted += len(blocks) * num_slots
        audited = [len(row.drafts) for row in blocks if row.is_audit]
        ledger.num_audited_rounds += len(audited)
        ledger.num_audit_drafts += sum(audited)
