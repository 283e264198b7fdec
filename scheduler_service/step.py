"""One step: plan, draft, choose verify lengths, verify, commit. Two calls at most (docs/architecture.md).

Plain steps are chained: while step t runs, step t + 1 is sent behind it, with "what t emits for this slot" in place of
anchors, so that the verifier goes from one forward to the next without the scheduler, which commits t meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter_ns

from scheduler_service import tracing
from scheduler_service.batch import Batch
from scheduler_service.block_accept_observer import BlockAcceptObserver
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.commit import Committer
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.counts import WindowCounts
from scheduler_service.draft_planner import carry_out, look_ahead
from scheduler_service.executor_types import NO_ASKS, Phase, StepResult, TargetProbAsks
from scheduler_service.executors import DrafterClient, VerifierClient
from scheduler_service.grammar.token_masks import TokenMasks
from scheduler_service.ledger import Ledger
from scheduler_service.planner import plan_chained, plan_step
from scheduler_service.policy import VerifyPolicy
from scheduler_service.request import FinishReason
from scheduler_service.step_calls import draft_call, step_call
from scheduler_service.step_learning import EndedStep, StepLearning, StepTime
from scheduler_service.step_plan import StepPlan
from scheduler_service.step_record import StepObserver
from scheduler_service.step_trace import StepTrace
from scheduler_service.transport import Metadata
from scheduler_service.windows import WindowChooser

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _SentStep:
    """A step that the verifier has."""

    step_id: int
    plan: StepPlan
    sent_ns: int
    is_traced: bool
    is_chained: bool
    """Whether it was sent behind another one."""
    draft_ns: int
    """Wall time of the Draft call before it."""


class StepEngine:
    """Runs steps over a batch. Knows nothing of threads."""

    def __init__(
        self,
        batch: Batch,
        committer: Committer,
        ledger: Ledger,
        verifier: VerifierClient,
        drafter: DrafterClient | None,
        policy: VerifyPolicy | None,
        step_ids: Iterator[int],
        flush: Callable[[], None],
        *,
        chain_plain_steps: bool,
        trace: StepTrace,
        costs: OnlineCosts | None = None,
        observers: Iterable[StepObserver] = (),
        calibration: CalibrationMonitor | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        """`drafter` and `policy` are None when speculation is off. `flush` delivers events; called while the executors
        have the next call. `costs` and `observers` learn from every step; `calibration` corrects confidences before the
        policy sees them. `masks` is None where no request has a grammar."""
        self._batch, self._committer, self._ledger = batch, committer, ledger
        self._verifier, self._drafter = verifier, drafter
        self._windows = WindowChooser(policy, calibration, ledger) if policy is not None else None
        self._masks = masks
        self._step_ids, self._flush = step_ids, flush
        self._chain_plain_steps, self._trace = chain_plain_steps, trace
        self.window_counts = WindowCounts(batch.limits.block_size)
        self._block_accept = BlockAcceptObserver(ledger) if drafter is not None else None
        everybody = (*observers, *([self._block_accept] if self._block_accept else []))
        self._learning = StepLearning(batch, ledger, costs, everybody, chain_plain_steps=chain_plain_steps)
        self._in_flight: _SentStep | None = None
        self._ended_ns = 0
        """When the last step's result had been committed."""

    @property
    def is_step_in_flight(self) -> bool:
        """Whether the verifier has a step whose result was not taken yet."""
        return self._in_flight is not None

    def catch_up(self) -> None:
        """Learns from the last step; for when no other follows."""
        self._learning.catch_up()

    def run(self) -> None:
        """Finishes one step: the one in flight, else a new one. Raises ExecutorError when an executor cannot be reached
        or refuses the call."""
        if self._in_flight is not None:
            self._learning.catch_up()
            self._finish(self._in_flight)
            return
        self._ended_ns = perf_counter_ns()
        plan = plan_step(self._batch)
        step_id = next(self._step_ids)
        with tracing.step_span(plan.rows, step_id) as metadata:
            draft_ns, step = 0, None
            if self._drafter is not None:
                draft_ns, step = self._draft(self._drafter, plan, step_id, metadata)
            self._learning.catch_up()  # without a Draft call; what the step asks for follows from all before it
            if self._masks is not None:
                self._mask(self._masks, plan, step_id)
            if plan.rows:
                step = step or self._send(plan, step_id, metadata, draft_ns=draft_ns)
                self._note_draft(plan)
                self._finish(step)
            else:  # the last ingests of sequences that ended were all there was to do
                self._note_draft(plan)

    def _draft(
        self, drafter: DrafterClient, plan: StepPlan, step_id: int, metadata: Metadata
    ) -> tuple[int, _SentStep | None]:
        """Ingests and drafts what is planned; returns the wall time of the call, and the step if it could be sent right
        behind, because the verifier chooses its windows."""
        drafted, ingests = plan.drafted, plan.ingests
        if not drafted and not ingests:
            carry_out(self._batch, plan)
            return 0, None
        for row in drafted:
            row.sequence.round += 1  # at issue: even a call that fails has used its noise
        settles = bool(drafted) and self._windows is not None and self._windows.settles_budgets
        if settles and self._windows is not None:
            carry_out(self._batch, plan)
            self._windows.settle(plan)
        is_settled = plan.budget is not None
        odds = self._windows.odds() if is_settled and self._windows is not None else None
        call = draft_call(self._batch, plan, step_id, publishes_blocks=is_settled, confidence_odds=odds)
        started = perf_counter_ns()
        drafter.send(call, metadata)
        step = self._send(plan, step_id, metadata) if is_settled else None
        if not settles:
            carry_out(self._batch, plan)
        self._learning.catch_up()  # before its events go out: who sees a request's end sees it counted
        self._flush()
        if drafted and self._windows is not None and not settles:
            self._windows.prepare(plan)
        result = drafter.receive(call)
        received_ns = perf_counter_ns()
        self._ledger.draft_call_ns += received_ns - started
        self._trace.record(step_id, [Phase("draft_call", started, received_ns)])
        self._ledger.drafter_model_ns += result.model_ns
        for index, reason in result.ingest_failures.items():
            sequence = ingests[index]
            sequence.context_lost = f"draft context lost: {reason}"
            log.warning("request %r: %s", sequence.request.request_id, sequence.context_lost)
        draft_ns = received_ns - started
        if step is not None and self._windows is not None:
            self._windows.take(plan, result)
            return draft_ns, replace(step, sent_ns=received_ns, draft_ns=draft_ns)  # it has waited for the drafter
        if drafted and self._windows is not None:
            self._windows.choose(plan, result)
        return draft_ns, None

    def _note_draft(self, plan: StepPlan) -> None:
        """What the Draft call did, as far as the Step call does not wait for it."""
        for sequence in plan.ingests:
            if not sequence.context_lost:
                self._batch.acknowledge_ingest(sequence)
        self._batch.release_closed()
        self._note_windows(plan)

    def _note_windows(self, plan: StepPlan) -> None:
        if plan.windows is not None and self._windows is not None:
            self._windows.count(plan, plan.windows, self.window_counts)

    def _mask(self, masks: TokenMasks, plan: StepPlan, step_id: int) -> None:
        """Writes masks for the rows whose answers must have a form; those of broken matchers end here."""
        masked = [row for row in plan.rows if row.sequence.matcher is not None and row.emits]
        if not masked:
            return
        started = perf_counter_ns()
        try:
            failed: dict[int, Exception] = masks.fill(step_id, masked)
        except Exception as error:  # their trouble must not become everyone's
            log.exception("masks cannot be had")
            failed = dict.fromkeys(range(len(masked)), error)
        for index, row in enumerate(masked):
            row.is_masked = index not in failed
            if not row.is_masked:
                self._committer.finish(row.sequence, FinishReason.ERROR, f"structured_output: {failed[index]}")
        if failed:
            plan.rows = [row for row in plan.rows if row.sequence.finish_reason is None]
        self._trace.record(step_id, [Phase("masks", started, perf_counter_ns())])

    def _send(
        self, plan: StepPlan, step_id: int, metadata: Metadata, *, draft_ns: int = 0, is_chained: bool = False
    ) -> _SentStep:
        call = step_call(self._batch, plan, step_id, self._asks(plan))
        sent_ns = perf_counter_ns()
        self._verifier.send(call, metadata)
        return _SentStep(step_id, plan, sent_ns, bool(metadata), is_chained, draft_ns)

    def _asks(self, plan: StepPlan) -> TargetProbAsks:
        if self._block_accept is None or plan.budget is not None:  # without lengths it is not known what to ask
            return NO_ASKS
        return self._block_accept.asks(plan.rows)

    def _chain(self, step: _SentStep) -> _SentStep | None:
        """Sends the step after `step`, if that can be planned before the result of `step` is known."""
        if not self._chain_plain_steps or step.is_traced or step.plan.budget is not None:
            return None
        rows = plan_chained(self._batch, step.plan.rows)
        if not rows or any(row.sequence.request.span is not None for row in rows):
            return None  # traced steps go by another way, which this one would not be behind
        return self._send(StepPlan(rows), next(self._step_ids), (), is_chained=True)

    def _finish(self, step: _SentStep) -> None:
        """Sends what can be sent behind the step, then takes its result and commits it."""
        self._in_flight = self._chain(step)
        self._flush()
        if step.plan.drafted:
            look_ahead(self._batch, step.plan.rows)
        result = self._verifier.receive()
        ledger, received_ns = self._ledger, perf_counter_ns()
        called_ns = max(
            step.sent_ns, self._ended_ns
        )  # a chained step's call begins when the one before has been committed
        ledger.step_call_ns += received_ns - called_ns
        ledger.verifier_model_ns += result.model_ns
        ledger.verifier_accept_ns += result.accept_ns
        if step.plan.budget is not None and self._windows is not None:
            self._windows.fill(step.plan, result.verify_lens)
            self._note_windows(step.plan)
        self._commit(step, result)
        self._batch.return_surplus()
        ledger.num_steps += 1
        ledger.num_chained_steps += step.is_chained
        ended_ns = perf_counter_ns()
        time = StepTime(ended_ns - self._ended_ns, step.draft_ns, received_ns - called_ns)
        self._learning.keep(EndedStep(step.step_id, step.plan, result, time, step.is_chained))
        ledger.step_ns += ended_ns - self._ended_ns
        self._ended_ns = ended_ns
        own = [Phase("step_call", called_ns, received_ns), Phase("commit", received_ns, ended_ns)]
        self._trace.record(step.step_id, [*result.phases, *own])

    def _commit(self, step: _SentStep, result: StepResult) -> None:
        """Commits every row."""
        token_ids, failures = result.token_ids, result.failures
        has_scores = bool(result.scores or result.prompt_scores)
        offset = 0
        for index, (row, num_accepted) in enumerate(zip(step.plan.rows, result.accepted_lens, strict=True)):
            begin, has_failed = offset, index in failures
            if row.emits and not has_failed:
                offset += num_accepted + 1
            if not row.is_current:
                continue
            if has_failed:
                self._committer.fail_row(row, failures[index])
                continue
            if has_scores:
                row.scores, row.prompt_scores = result.scores.get(index, []), result.prompt_scores.get(index, [])
            if row.emits and row.sequence.request.reports_steps:
                row.report = step.plan.report(row, num_accepted)
            try:
                self._committer.commit(row, num_accepted, token_ids[begin:offset], step.step_id)
            except Exception as error:  # one request's trouble must not become everyone's
                log.exception("request %r failed at commit", row.sequence.request.request_id)
                self._committer.finish(row.sequence, FinishReason.ERROR, f"{type(error).__name__}: {error}")
