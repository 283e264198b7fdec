"""Between the gateway's types and the scheduler's messages."""

from __future__ import annotations

from typing import Any

from dspark.v1 import gateway_pb2, scheduler_pb2, types_pb2

from gateway.tokens import (
    ChoiceStats,
    FinishReason,
    ModelInfo,
    Progress,
    Sampling,
    StepReport,
    Summary,
    TokenRequest,
    Tokens,
)
from service_kit.scores import scores_from_pb

_TO_REASON: dict[int, FinishReason] = {
    scheduler_pb2.FINISH_REASON_STOP: "stop",
    scheduler_pb2.FINISH_REASON_LENGTH: "length",
    scheduler_pb2.FINISH_REASON_ABORT: "abort",
    scheduler_pb2.FINISH_REASON_ERROR: "error",
}
_FROM_REASON: dict[FinishReason, Any] = {reason: value for value, reason in _TO_REASON.items()}


def request_to_pb(request: TokenRequest) -> scheduler_pb2.GenerateRequest:
    """The message of a request."""
    sampling, form = request.sampling, request.structured_output
    return scheduler_pb2.GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=scheduler_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias),
            bad_words=[types_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
            min_tokens=sampling.min_tokens,
        ),
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        num_choices=request.num_choices,
        speculation=scheduler_pb2.SpeculationParams(
            max_draft_tokens=request.max_draft_tokens,
            max_time_per_token_ms=request.max_time_per_token_ms,
            priority=request.priority,
        ),
        isolation_key=request.isolation_key,
        report_steps=request.reports_steps,
        structured_output=scheduler_pb2.StructuredOutput(**{form.kind: form.text}) if form is not None else None,
    )


def abort_to_pb(request_id: str, choice: int | None, reason: FinishReason) -> scheduler_pb2.AbortRequest:
    """The message that ends a request or one of its choices."""
    return scheduler_pb2.AbortRequest(request_id=request_id, choice=choice, reason=_FROM_REASON[reason])


def response_from_pb(response: scheduler_pb2.GenerateResponse) -> Tokens | Summary:
    """One message of the stream."""
    if response.WhichOneof("event") == "chunk":
        chunk = response.chunk
        return Tokens(
            chunk.choice,
            list(chunk.token_ids),
            chunk.num_accepted,
            _TO_REASON.get(int(chunk.finish_reason)),
            scores_from_pb(chunk.scores),
            scores_from_pb(chunk.prompt_scores),
            _report_from_pb(chunk) if chunk.num_rows else None,
        )
    summary = response.summary
    return Summary(
        choices=tuple(map(stats_from_pb, summary.choices)),
        num_prompt_tokens=summary.num_prompt_tokens,
        error=summary.error,
        speculation_off_reason=summary.speculation_off_reason,
        num_cached_tokens=summary.num_cached_tokens,
    )


def _report_from_pb(chunk: scheduler_pb2.TokenChunk) -> StepReport:
    return StepReport(
        num_drafted=chunk.num_drafted,
        num_verified=chunk.num_verified,
        num_accepted=chunk.num_accepted,
        num_uncut_accepted=chunk.num_uncut_accepted,
        confidences=list(chunk.confidences),
        budget=chunk.budget,
        num_rows=chunk.num_rows,
    )


def report_to_pb(report: StepReport | None) -> gateway_pb2.StepReport | None:
    """The message that tells text clients what a step did."""
    return None if report is None else gateway_pb2.StepReport(**vars(report))


def stats_from_pb(stats: scheduler_pb2.ChoiceSummary) -> ChoiceStats:
    """Statistics of one choice."""
    return ChoiceStats(
        choice=stats.choice,
        finish_reason=_TO_REASON.get(int(stats.finish_reason)),
        num_tokens=stats.num_tokens,
        num_steps=stats.num_steps,
        num_drafted=stats.num_drafted,
        num_verified=stats.num_verified,
        num_accepted=stats.num_accepted,
        accepted_histogram=tuple(stats.accepted_histogram),
        num_drafted_steps=stats.num_drafted_steps,
        num_uncut_accepted=stats.num_uncut_accepted,
    )


def stats_to_pb(stats: ChoiceStats) -> scheduler_pb2.ChoiceSummary:
    """The message of one choice's statistics."""
    return scheduler_pb2.ChoiceSummary(
        choice=stats.choice,
        finish_reason=reason_to_pb(stats.finish_reason),
        num_tokens=stats.num_tokens,
        num_steps=stats.num_steps,
        num_drafted=stats.num_drafted,
        num_verified=stats.num_verified,
        num_accepted=stats.num_accepted,
        accepted_histogram=stats.accepted_histogram,
        num_drafted_steps=stats.num_drafted_steps,
        num_uncut_accepted=stats.num_uncut_accepted,
    )


def reason_to_pb(reason: FinishReason | None) -> Any:
    """The enum value of a finish reason."""
    return _FROM_REASON[reason] if reason else scheduler_pb2.FINISH_REASON_UNSPECIFIED


def sampling_from_pb(params: scheduler_pb2.SamplingParams) -> Sampling:
    """Sampling with None where a field is unset."""
    names = (
        *("temperature", "top_k", "top_p", "min_p", "seed"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    )
    return Sampling(
        **{name: getattr(params, name) for name in names if params.HasField(name)},
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_words=tuple(tuple(word.token_ids) for word in params.bad_words),
        min_tokens=params.min_tokens,
    )


def progress_from_pb(load: scheduler_pb2.GetLoadResponse) -> Progress:
    """How far the scheduler is."""
    return Progress(
        num_unfinished=load.num_running + load.num_waiting, num_tokens=load.num_committed + load.num_prefill_tokens
    )


def model_info_from_pb(info: scheduler_pb2.GetModelInfoResponse) -> ModelInfo:
    """What is served."""
    return ModelInfo(
        model=info.model,
        drafter=info.drafter,
        verify_mode=info.verify_mode,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_num_seqs=info.max_num_seqs,
        block_size=info.block_size,
        sampling_defaults=sampling_from_pb(info.sampling_defaults),
        inexact_reason=info.inexact_reason,
        structured_output_off_reason=info.structured_output_off_reason,
    )
