"""What a step that has ended tells the draft gate, the cost model, the ledger and the observers.

That takes time, and nobody needs it at once: a step is kept until an executor has the next call (`catch_up`). So what
is drafted follows from all steps but the last one before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from scheduler_service.batch import Batch
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.draft_gate import StepShape
from scheduler_service.draft_history import DraftedRounds
from scheduler_service.executor_types import StepResult
from scheduler_service.ledger import Ledger
from scheduler_service.policy import StepWork
from scheduler_service.step_plan import StepPlan, step_shape
from scheduler_service.step_record import RowRound, StepObserver, StepRecord, row_rounds


class StepTime(NamedTuple):
    """Wall time, in nanoseconds."""

    whole_ns: int
    draft_ns: int
    """Of the Draft call."""
    call_ns: int
    """Of the Step call."""


class EndedStep(NamedTuple):
    """A step that was committed."""

    step_id: int
    plan: StepPlan
    result: StepResult
    time: StepTime
    is_chained: bool
    """Whether it was sent behind another one."""


class StepLearning:
    """Used by the step thread alone."""

    def __init__(
        self,
        batch: Batch,
        ledger: Ledger,
        costs: OnlineCosts | None,
        observers: Iterable[StepObserver],
        *,
        chain_plain_steps: bool,
    ) -> None:
        """`chain_plain_steps`: whether a plain step is only steady once it was sent behind another one."""
        self._batch, self._ledger, self._costs = batch, ledger, costs
        self._observers, self._chain_plain_steps = tuple(observers), chain_plain_steps
        self._kept: EndedStep | None = None
        self._has_drafted = False
        """Whether the step learned from last did."""

    def keep(self, step: EndedStep) -> None:
        """To be learned from when there is time, and before the next one ends."""
        self.catch_up()
        self._kept = step

    def catch_up(self) -> None:
        """Learns from the step that was kept, if any."""
        if self._kept is not None:
            step, self._kept = self._kept, None
            self._learn(step)

    def _learn(self, step: EndedStep) -> None:
        plan, time = step.plan, step.time
        rounds = row_rounds(plan, step.result)
        decoding = [row for row in plan.rows if row.emits and row.num_tokens == 1]
        num_prefill = sum(row.num_tokens for row in plan.rows) - len(decoding)
        shape = step_shape(decoding, num_prefill)
        # A step with masks is never chained: what it takes is what plain steps take just now.
        can_chain = self._chain_plain_steps and not any(row.is_masked for row in plan.rows)
        is_steady = not plan.ingests and (step.is_chained or not can_chain)
        ingests_little = plan.num_ingested <= len(plan.rows) * (self._batch.limits.block_size + 1)
        if not num_prefill:
            self._count_decode(rounds, time)
        if plan.drafted:
            self._tell_gate(plan, shape, rounds, time.whole_ns, is_steady=ingests_little)
        else:
            gain_ns = self._batch.draft_gate.observe_plain(
                shape, time.whole_ns, is_steady=is_steady, is_disturbed=self._has_drafted or bool(plan.ingests)
            )
            self._ledger.measured_gain_ns += round(gain_ns)
        self._has_drafted = bool(plan.drafted)
        num_verified = sum(len(row.drafts) for row in plan.rows)
        read = shape.num_context + sum(len(row.drafts) * (row.start + 1) for row in plan.rows)
        work = StepWork(
            len(plan.rows), len(plan.drafted), shape.num_tokens + num_verified, read, plan.decision.num_slots
        )
        if self._costs is not None and not num_prefill and (plan.drafted or is_steady):
            draft_ns = time.draft_ns if ingests_little else 0
            self._costs.observe(work, step_ns=time.whole_ns - time.draft_ns, draft_ns=draft_ns)
            self._ledger.set_prediction_errors(self._costs.step_errors, self._costs.draft_errors)
        if self._observers:
            record = StepRecord(step.step_id, work, num_prefill, time.whole_ns, time.draft_ns, rounds)
            for observer in self._observers:
                observer.observe(record)

    def _count_decode(self, rounds: list[RowRound], time: StepTime) -> None:
        ledger = self._ledger
        ledger.num_decode_steps += 1
        ledger.num_decode_committed += sum(len(each.committed_ids) for each in rounds)
        ledger.decode_step_ns += time.whole_ns
        ledger.decode_draft_call_ns += time.draft_ns
        ledger.decode_step_call_ns += time.call_ns

    def _tell_gate(
        self, plan: StepPlan, shape: StepShape, rounds: list[RowRound], elapsed_ns: int, *, is_steady: bool
    ) -> None:
        drafted = [each for each in rounds if each.draft_ids]
        gate, ledger = self._batch.draft_gate, self._ledger
        gain_ns = gate.observe_drafted(shape, plan.decision, _drafted_rounds(drafted), elapsed_ns, is_steady=is_steady)
        ledger.num_drafted_steps += 1
        ledger.predicted_gain_ns += round(plan.decision.gain_ns)
        ledger.measured_gain_ns += round(gain_ns)


def _drafted_rounds(rounds: list[RowRound]) -> DraftedRounds:
    """As the draft gate takes them."""
    lens = np.array([len(each.draft_ids) for each in rounds], np.intp)
    verified = np.array([min(each.verify_len, each.commit_len) for each in rounds], np.intp)
    accepted = np.array([min(each.num_accepted, each.commit_len) for each in rounds], np.intp)
    confidences = np.full((len(rounds), lens.max(initial=0)), np.nan, np.float32)
    for own, each in zip(confidences, rounds, strict=True):
        own[: len(each.draft_ids)] = each.confidences
    slots = np.array([each.sequence.slot for each in rounds], np.intp)
    return DraftedRounds(slots, lens, verified, accepted, confidences)
