"""gRPC face of the scheduler. Wire types of SchedulerService stop here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import fields, replace
from typing import Any

from dspark.v1 import scheduler_pb2 as pb
from dspark.v1 import scheduler_pb2_grpc, types_pb2
from prometheus_client.metrics_core import Metric

from kernels.sampling import Regime
from scheduler_service import tracing
from scheduler_service.grammar.form import StructuredOutput, refusal
from scheduler_service.metrics import scheduler_metrics
from scheduler_service.request import (
    ChoiceSummary,
    Delivery,
    Event,
    FinishReason,
    GenerateSpec,
    SamplingOptions,
    Summary,
    TokenChunk,
)
from scheduler_service.service import Scheduler, deliver_directly
from service_kit.errors import InvalidRequestError, UnavailableError
from service_kit.scores import scores_to_pb

SERVICE_NAME = "dspark.v1.SchedulerService"

_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


_REGIMES = {
    Regime.GREEDY: types_pb2.REGIME_GREEDY,
    Regime.COUPLED: types_pb2.REGIME_COUPLED,
    Regime.REJECTION: types_pb2.REGIME_REJECTION,
}


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves on the running event loop; answers UNAVAILABLE until it is given a scheduler."""

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None

    def serve(self, scheduler: Scheduler, failed: asyncio.Event) -> None:
        """Starts serving `scheduler`; `failed` is set if its step loop fails. Call on the event loop."""
        loop = asyncio.get_running_loop()

        def deliver(deliveries: list[Delivery]) -> None:
            loop.call_soon_threadsafe(deliver_directly, deliveries)

        def fail(reason: str) -> None:
            loop.call_soon_threadsafe(failed.set)

        scheduler.set_delivery(deliver, fail)
        if scheduler.failure:
            failed.set()
        self._scheduler = scheduler

    def metrics(self) -> Iterable[Metric]:
        """Metrics of the scheduler; none before there is one."""
        return scheduler_metrics(self._scheduler) if self._scheduler is not None else ()

    def _ready(self) -> Scheduler:
        if self._scheduler is None:
            raise UnavailableError("loading: the executors are not ready yet")
        return self._scheduler

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Streams chunks, then the summary. The call's end, however it comes, ends the request."""
        scheduler = self._ready()
        events: asyncio.Queue[Event] = asyncio.Queue()
        span = tracing.start_request_span("scheduler.generate", context.invocation_metadata())
        try:
            spec = _spec_from_pb(request)
            if (form := _form_from_pb(request)) is not None:
                grammar = await asyncio.wrap_future(scheduler.compile(form))
                spec = replace(spec, grammar=grammar)
            live = scheduler.submit(spec, events.put_nowait, span)
            # Not a `finally`: a stream cancelled while a message is being written is never resumed.
            context.add_done_callback(lambda _: scheduler.end(live))
            await context.send_initial_metadata(())  # tells the caller that the request is queued
            while True:
                event = await events.get()
                if span is not None and isinstance(event, Summary):
                    tracing.describe_end(span, request.request_id, event)
                yield _event_to_pb(event)
                if isinstance(event, Summary):
                    return
        finally:
            if span is not None:
                span.end()

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Ends a request or one of its choices."""
        if request.reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_ABORT):
            raise InvalidRequestError("reason must be FINISH_REASON_STOP or FINISH_REASON_ABORT", field="reason")
        choice = request.choice if request.HasField("choice") else None
        self._ready().abort(request.request_id, choice, FinishReason(request.reason))
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Describes what is served."""
        scheduler = self._ready()
        info, limits = scheduler.info, scheduler.limits
        return pb.GetModelInfoResponse(
            model=info.model,
            drafter=info.drafter,
            verify_mode=info.verify_mode,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            eos_token_ids=sorted(limits.eos_token_ids),
            block_size=limits.block_size,
            sampling_defaults=pb.SamplingParams(
                temperature=info.sampling_defaults.temperature,
                top_k=info.sampling_defaults.top_k,
                top_p=info.sampling_defaults.top_p,
                min_p=info.sampling_defaults.min_p,
                repetition_penalty=info.sampling_defaults.repetition_penalty,
            ),
            speculation_off_reason=info.speculation_off_reason,
            inexact_reason=info.inexact_reason,
            calibration=info.calibration,
            structured_output_off_reason=info.structured_output_off_reason,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        """Gauges and counters."""
        load = self._ready().load()
        return pb.GetLoadResponse(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_free_slots=load.num_free_slots,
            num_slots=load.num_slots,
            num_free_pages=load.num_free_pages,
            num_pages=load.num_pages,
            num_preemptions=load.num_preemptions,
            num_cached_pages=load.num_cached_pages,
            num_prefix_cache_queries=load.num_prefix_cache_queries,
            num_prefix_cache_hits=load.num_prefix_cache_hits,
            calibration_errors=[
                pb.CalibrationError(
                    regime=_REGIMES[each.regime],
                    position=each.position,
                    ece=each.error,
                    num_observed=each.num_observed,
                    correction=each.correction,
                )
                for each in load.calibration_errors
            ],
            **{counter.name: getattr(load.ledger, counter.name) for counter in fields(load.ledger)},
        )


def _spec_from_pb(request: pb.GenerateRequest) -> GenerateSpec:
    sampling = request.sampling
    given = {
        name: getattr(sampling, name)
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        )
        if sampling.HasField(name)
    }
    given["logit_bias"] = tuple(sorted(sampling.logit_bias.items()))
    given["bad_words"] = tuple(tuple(word.token_ids) for word in sampling.bad_words)
    given["min_tokens"] = sampling.min_tokens
    return GenerateSpec(
        request_id=request.request_id,
        prompt=list(request.prompt_token_ids),
        sampling=SamplingOptions(**given),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        num_choices=request.num_choices or 1,
        isolation_key=request.isolation_key,
        bypass_prefix_cache=request.bypass_prefix_cache,
        **_speculation(request.speculation),
        num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
        num_prompt_logprobs=request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None,
        reports_steps=request.report_steps,
    )


def _form_from_pb(request: pb.GenerateRequest) -> StructuredOutput | None:
    """Raises InvalidRequestError for a form that is none of those of the contract."""
    if not request.HasField("structured_output"):
        return None
    kind = request.structured_output.WhichOneof("form")
    if kind is None:
        raise refusal("set one of json_schema, regex and lark")
    return StructuredOutput(kind, getattr(request.structured_output, kind))


def _speculation(speculation: pb.SpeculationParams) -> dict[str, Any]:
    names = ("max_draft_tokens", "max_time_per_token_ms", "priority")
    given = {name: getattr(speculation, name) for name in names if speculation.HasField(name)}
    if speculation.HasField("enabled") and not speculation.enabled:
        given["max_draft_tokens"] = 0
    return given


def _event_to_pb(event: Event) -> pb.GenerateResponse:
    if isinstance(event, TokenChunk):
        return pb.GenerateResponse(
            chunk=pb.TokenChunk(
                choice=event.choice,
                token_ids=event.token_ids,
                num_accepted=event.num_accepted,
                num_verified=event.num_verified,
                finish_reason=_REASONS[event.finish_reason],
                scores=scores_to_pb(event.scores),
                prompt_scores=scores_to_pb(event.prompt_scores),
                **(event.report._asdict() if event.report is not None else {}),
            )
        )
    return pb.GenerateResponse(
        summary=pb.GenerateSummary(
            choices=[_choice_to_pb(choice) for choice in event.choices],
            num_prompt_tokens=event.num_prompt_tokens,
            error=event.error,
            speculation_off_reason=event.speculation_off_reason,
            num_cached_tokens=event.num_cached_tokens,
        )
    )


def _choice_to_pb(choice: ChoiceSummary) -> pb.ChoiceSummary:
    return pb.ChoiceSummary(
        choice=choice.choice,
        finish_reason=_REASONS[choice.finish_reason],
        num_tokens=choice.num_tokens,
        num_steps=choice.num_steps,
        num_drafted=choice.num_drafted,
        num_verified=choice.num_verified,
        num_accepted=choice.num_accepted,
        accepted_histogram=choice.accepted_histogram,
        num_drafted_steps=choice.num_drafted_steps,
        num_uncut_accepted=choice.num_uncut_accepted,
    )
