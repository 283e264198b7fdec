"""The scheduler as an object: submit, abort, load, drain. Thread-safe; knows nothing of gRPC servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scheduler_service.admission import Limits, accept_request
from scheduler_service.batch import Batch
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.commit import Committer
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.counts import ChoiceCounts, WindowCounts
from scheduler_service.executor_types import SamplingDefaults
from scheduler_service.executors import DrafterClient, VerifierClient
from scheduler_service.grammar.form import StructuredOutput, refusal
from scheduler_service.grammar.matcher import Grammar
from scheduler_service.grammar.structure import Structure
from scheduler_service.ledger import Ledger, Load
from scheduler_service.policy import VerifyPolicy
from scheduler_service.request import Delivery, Event, FinishReason, GenerateSpec, Request
from scheduler_service.settings import SchedulerSettings
from scheduler_service.step import StepEngine
from scheduler_service.step_loop import StepLoop
from scheduler_service.step_record import StepObserver
from scheduler_service.step_trace import StepTrace
from service_kit.errors import InvalidRequestError, QueueFullError, UnavailableError

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(frozen=True)
class ModelInfo:
    """What is served."""

    model: str
    drafter: str
    """Empty when there is none."""
    verify_mode: str
    speculation_off_reason: str
    """Empty when speculation is on."""
    sampling_defaults: SamplingDefaults
    inexact_reason: str = ""
    """Why texts may change with the load; empty when they do not."""
    calibration: str = ""
    """How the drafter's confidences are calibrated, in words; empty without a drafter."""
    structured_output_off_reason: str = ""
    """Why no answer can be given a form; empty when it can."""


def deliver_directly(deliveries: list[Delivery]) -> None:
    """Hands each event to its sink on the calling thread."""
    for sink, event in deliveries:
        sink(event)


class Scheduler:
    """Generates tokens for many requests at once. Create with `startup.build_scheduler`."""

    def __init__(self, settings: SchedulerSettings, limits: Limits, info: ModelInfo, batch: Batch) -> None:
        """A scheduler that accepts nothing before `start`. `batch` must be empty."""
        self.settings, self.limits, self.info = settings, limits, info
        self.failure = ""
        """Why the step loop ended, if it failed."""
        self._lock = threading.Lock()
        self._live: dict[str, Request] = {}
        self._num_queued_requests = self._num_queued_tokens = 0
        self._is_draining = False
        self._batch, self._ledger = batch, Ledger()
        self._observers: tuple[StepObserver, ...] = ()
        self._calibration: CalibrationMonitor | None = None
        self._structure: Structure | None = None
        self._trace = StepTrace(settings.trace_steps)
        self._committer = Committer(batch, self._ledger, info.speculation_off_reason, self._forget)
        self._deliver: Callable[[list[Delivery]], None] = deliver_directly
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._loop = StepLoop(batch, self._committer, self._hand_over, self._leave_queue, self._record_failure)
        self.choice_counts: ChoiceCounts = self._committer.counts
        self.window_counts = WindowCounts(limits.block_size)
        self.num_refused = {"queue_full": 0, "draining": 0}
        """Requests not taken, by reason."""

    def start(
        self,
        verifier: VerifierClient,
        drafter: DrafterClient | None,
        policy: VerifyPolicy | None,
        step_ids: Iterator[int],
        costs: OnlineCosts | None = None,
        observers: Iterable[StepObserver] = (),
        calibration: CalibrationMonitor | None = None,
        structure: Structure | None = None,
    ) -> None:
        """Starts the step thread. The executors must be attached; `step_ids` goes on from what they have seen. `costs`
        and `observers` learn from every step, `calibration` as well; it corrects confidences."""
        self._calibration, self._structure = calibration, structure
        self._observers = (*observers, *([calibration] if calibration is not None else []))
        engine = StepEngine(
            self._batch,
            self._committer,
            self._ledger,
            verifier,
            drafter,
            policy,
            step_ids,
            self._loop.flush,
            chain_plain_steps=self.settings.chain_plain_steps,
            trace=self._trace,
            costs=costs,
            observers=self._observers,
            calibration=calibration,
            masks=structure.masks if structure is not None else None,
        )
        self.window_counts = engine.window_counts
        self._loop.start(engine)

    def set_delivery(self, deliver: Callable[[list[Delivery]], None], on_failure: Callable[[str], None]) -> None:
        """Where events go (by default to the sinks, on the step thread), and who is told if the step loop fails."""
        self._deliver, self._on_failure = deliver, on_failure

    def compile(self, form: StructuredOutput) -> Future[Grammar]:
        """A form for requests (`GenerateSpec.grammar`). Raises, or the future does, InvalidRequestError where it cannot
        be had, QueueFullError where too many are asked for at once."""
        if self._structure is None:
            raise refusal(self.info.structured_output_off_reason)
        return self._structure.compiler.compile(form)

    def submit(self, spec: GenerateSpec, sink: Callable[[Event], None], span: Span | None = None) -> Request:
        """Queues a request; its events go to `sink`: chunks, then one summary.

        Raises InvalidRequestError, QueueFullError, or UnavailableError while draining.
        """
        if spec.max_time_per_token_ms is not None and self._batch.costs is None and self.limits.block_size:
            raise InvalidRequestError(
                f"verify_mode {self.settings.verify_mode} verifies by a fixed rule and cannot keep a time per token: "
                "leave max_time_per_token_ms out, or serve with verify_mode compact",
                field="speculation.max_time_per_token_ms",
            )
        request = accept_request(spec, self.limits, sink)
        if request.target_ns is None and self.settings.max_time_per_token_ms:
            request.target_ns = 1e6 * self.settings.max_time_per_token_ms
        request.span = span
        num_tokens = len(request.prompt)
        with self._lock:
            if self._is_draining:
                self.num_refused["draining"] += 1
                raise UnavailableError("draining: this server is shutting down")
            if spec.request_id in self._live:
                raise InvalidRequestError(f"request_id {spec.request_id!r} is in use", field="request_id")
            is_over = self._num_queued_tokens + num_tokens > self.settings.max_queued_tokens
            if self._num_queued_requests and is_over:
                self.num_refused["queue_full"] += 1
                raise QueueFullError(f"{self._num_queued_tokens} prompt tokens are waiting: try again later")
            if self._num_queued_requests >= self.settings.max_queued_requests:
                self.num_refused["queue_full"] += 1
                raise QueueFullError(f"{self._num_queued_requests} requests are waiting: try again later")
            self._loop.post(lambda: self._batch.enqueue(request))
            self._live[spec.request_id] = request
            self._num_queued_requests += 1
            self._num_queued_tokens += num_tokens
        return request

    def abort(self, request_id: str, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a live request or one of its choices. Idempotent; unknown ids and choices are ignored."""
        with self._lock:
            request = self._live.get(request_id)
        if request is not None:
            self.end(request, choice, reason)

    def end(self, request: Request, choice: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Like `abort`, for this very request even if its id has been reused. Takes effect within one step."""

        def command() -> None:
            for sequence in request.choices:
                if choice is None or sequence.choice == choice:
                    self._committer.finish(sequence, reason)

        try:
            self._loop.post(command)
        except UnavailableError:
            return  # the loop has ended, and with it every request

    @property
    def queue(self) -> tuple[int, int]:
        """Requests that wait for admission, and their prompt tokens."""
        with self._lock:
            return self._num_queued_requests, self._num_queued_tokens

    def load(self) -> Load:
        """Gauges and counters."""
        batch = self._batch
        return Load(
            num_running=len(batch.running),
            num_waiting=self._count_waiting(),
            num_free_slots=len(batch.free_slots),
            num_slots=self.limits.max_num_seqs,
            num_free_pages=batch.pages.num_free,
            num_pages=self.limits.num_pages,
            num_preemptions=batch.num_preemptions,
            num_cached_pages=batch.pages.num_idle,
            num_prefix_cache_queries=batch.prefix_cache.num_queries,
            num_prefix_cache_hits=batch.prefix_cache.num_hits,
            calibration_errors=self._calibration.errors() if self._calibration is not None else [],
            ledger=replace(self._ledger),
        )

    def _count_waiting(self) -> int:
        with self._lock:
            live = list(self._live.values())
        return sum(1 for r in live for s in r.choices if s.finish_reason is None and not s.is_running)

    def check_integrity(self) -> None:
        """Raises AssertionError if pages or slots are leaked or owned twice. Runs between two steps."""
        done: Future[None] = Future()

        def command() -> None:
            try:
                self._batch.check_integrity()
                done.set_result(None)
            except AssertionError as error:
                done.set_exception(error)

        self._loop.post(command)
        done.result()

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones; False if some are left after `timeout_s`."""
        with self._lock:
            self._is_draining = True
        deadline = time.monotonic() + timeout_s
        while self._live and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._live

    def stop(self) -> None:
        """Aborts what is live and ends the step thread."""
        with self._lock:
            self._is_draining = True
            live = list(self._live.values())
        for request in live:
            self.end(request)
        self._loop.stop()
        self._trace.close()
        if self._structure is not None:
            self._structure.close()
        for observer in self._observers:
            observer.close()

    def _hand_over(self, deliveries: list[Delivery]) -> None:
        self._deliver(deliveries)

    def _leave_queue(self, request: Request) -> None:
        with self._lock:
            if request.is_queued:
                request.is_queued = False
                self._num_queued_requests -= 1
                self._num_queued_tokens -= len(request.prompt)

    def _forget(self, request: Request) -> None:
        self._leave_queue(request)
        with self._lock:
            self._live.pop(request.request_id, None)

    def _record_failure(self, reason: str) -> None:
        self.failure = reason
        self._on_failure(reason)
