"""The drafts that are verified: a policy's choice, and what it is told of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scheduler_service.audit import audited_windows, without_audited
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.counts import WindowCounts
from scheduler_service.executor_types import DraftResult
from scheduler_service.ledger import Ledger
from scheduler_service.policy import DraftedBatch, VerifyPolicy, Windows
from scheduler_service.policy.survival import usable_lens
from scheduler_service.request import Sequence as Choice
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

    @property
    def settles_budgets(self) -> bool:
        """Whether `settle` is worth asking before a step is drafted."""
        return self._policy.settles_budget

    def settle(self, plan: StepPlan) -> None:
        """Sets the budget of a step whose windows the verifier can choose: `take` and `fill` follow, else `choose`.

        Not one with audits, whose rows are verified whole, or with rows whose masks, controls or scores are told by the
        drafts of their windows.
        """
        self.prepare(plan)
        if not any(self._is_audit) and all(_is_simple(row.sequence) for row in plan.rows):
            plan.budget = self._policy.budget(self._batch)

    def odds(self) -> npt.NDArray[np.float64] | None:
        """How the drafter is to correct the confidences that it hands to the verifier; [drafted, slots]."""
        if self._calibration is None:
            return None
        return self._calibration.odds(self._regimes, self._batch.confidences.shape[1])

    def take(self, plan: StepPlan, result: DraftResult) -> None:
        """Takes the drafter's answer, whose windows are chosen elsewhere; `fill` follows."""
        drafted, confidences = plan.drafted, self._corrected(result)
        plan.draft, plan.confidences = result, confidences
        for row in drafted:
            if row.sequence.context_lost:
                row.max_drafts = 0  # its rows of this reply are void
        self._batch = replace(self._batch, confidences=confidences, max_drafts=[row.max_drafts for row in drafted])
        self._policy.spent(self._batch)

    def fill(self, plan: StepPlan, verify_lens: Sequence[int]) -> None:
        """Fills in the rows of `plan`, those of `take`, what the verifier chose; `verify_lens` of all rows."""
        lens_of = {id(row): verify_len for row, verify_len in zip(plan.rows, verify_lens, strict=True)}
        lens = [lens_of[id(row)] for row in plan.drafted]
        num_invalid = usable_lens(self._batch.confidences, self._batch.max_drafts).num_invalid
        assert plan.draft is not None
        self._give(plan, plan.draft, Windows(lens, lens, num_invalid))

    def _corrected(self, result: DraftResult) -> npt.NDArray[np.float32]:
        if self._calibration is None:
            return result.confidences
        return self._calibration.corrected(result.confidences, self._regimes)

    def choose(self, plan: StepPlan, result: DraftResult) -> None:
        """Fills in the rows of `plan` what the drafter answered. To be counted when there is time (`count`)."""
        drafted, confidences = plan.drafted, self._corrected(result)
        plan.draft, plan.confidences = result, confidences
        if lost := [row for row in drafted if row.sequence.context_lost]:
            for row in lost:
                row.max_drafts = 0  # its rows of this reply are void
            self.prepare(plan)
        windows = audited_windows(self._policy, replace(self._batch, confidences=confidences), self._is_audit)
        self._give(plan, result, windows)

    def _give(self, plan: StepPlan, result: DraftResult, windows: Windows) -> None:
        plan.windows = windows
        first, num_slots, token_ids = 0, plan.decision.num_slots, result.token_ids
        for row, verify_len, commit_len in zip(plan.drafted, windows.verify_lens, windows.commit_lens, strict=True):
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


def _is_simple(choice: Choice) -> bool:
    """Whether the verifier needs nothing for it but its drafts."""
    request = choice.request
    return choice.matcher is None and request.controls.is_neutral and request.num_logprobs is None
