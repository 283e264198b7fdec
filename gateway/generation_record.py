"""What is kept of a generation besides its text: its span, its times, and one log line at its end."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from gateway.genai import Operation, ServerMetrics, request_attributes, response_attributes
from gateway.metrics import GatewayMetrics
from gateway.request_scope import current_request
from gateway.tokens import ChoiceStats, FinishReason, Summary, TokenRequest
from service_kit.logs import log_event
from service_kit.telemetry import tracer

_log = logging.getLogger(__name__)


class GenerationRecord:
    """Made before the scheduler is asked; `end` or `refuse` follows, once. Times run from the call's arrival."""

    def __init__(
        self,
        request: TokenRequest,
        operation: Operation,
        model: str,
        metrics: GatewayMetrics,
        server_metrics: ServerMetrics,
    ) -> None:
        """`model` is the name that the client asked for."""
        self._request, self._operation, self._model = request, operation, model
        self._metrics, self._server_metrics = metrics, server_metrics
        self._call = current_request()
        self._first_s: list[float | None] = [None] * request.num_choices
        self._last_s = [0.0] * request.num_choices
        self._num_tokens = [0] * request.num_choices
        self._is_ended = False
        self._span = tracer().start_span(
            f"{operation} {model}", kind=SpanKind.INTERNAL, attributes=request_attributes(request, operation, model)
        )

    def entered(self) -> AbstractContextManager[trace.Span]:
        """The generation's span as the current one: what is called within is part of its trace."""
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def take(self, choice: int, num_tokens: int) -> None:
        """Tokens of a choice have come, all by one step."""
        if not num_tokens:
            return
        now = time.monotonic()
        if self._first_s[choice] is None:
            self._first_s[choice] = now
            self._metrics.first_token_s.observe(now - self._call.arrived_s)
        else:
            self._metrics.inter_token_s.observe((now - self._last_s[choice]) / num_tokens, num_tokens)
        self._last_s[choice] = now
        self._num_tokens[choice] += num_tokens

    def refuse(self, error: BaseException) -> None:
        """The scheduler did not take the request, or nobody waited for that; whoever answers the client logs it."""
        self._end_span(type(error).__name__)
        self._record_genai(time.monotonic(), type(error).__name__)

    def end(self, reasons: list[FinishReason | None], summary: Summary | None, error: Exception | None) -> None:
        """The generation has ended, however it did: by `reasons` of its choices, None where it was cut short."""
        if self._is_ended:
            return
        self._is_ended = True
        ended_s = time.monotonic()
        cut: FinishReason = "abort" if error is None else "error"
        known = [reason or cut for reason in reasons]
        for choice, first_s in enumerate(self._first_s):
            if (per_token_s := self._per_token_s(choice, first_s)) is not None:
                self._metrics.per_token_s.observe(per_token_s)
        if None not in reasons:
            self._metrics.request_s.observe(ended_s - self._call.arrived_s)
        error_type = "" if error is None else type(error).__name__
        num_cached = summary.num_cached_tokens if summary is not None else 0
        num_prompt, num_tokens = len(self._request.prompt_token_ids), sum(self._num_tokens)
        self._span.set_attributes(
            response_attributes(self._request.request_id, self._model, known, num_prompt, num_cached, num_tokens)
        )
        self._record_genai(ended_s, error_type)
        self._log(known, ended_s, num_cached, summary, error)
        self._end_span(error_type)

    def _log(
        self,
        reasons: list[FinishReason],
        ended_s: float,
        num_cached: int,
        summary: Summary | None,
        error: Exception | None,
    ) -> None:
        first_s = self._first_token_s
        stats: tuple[ChoiceStats, ...] = summary.choices if summary is not None else ()
        log_event(
            _log,
            "request ended",
            request_id=self._request.request_id,
            call_id=self._call.call_id or None,
            operation=self._operation,
            model=self._model,
            reasons=reasons,
            prompt_tokens=len(self._request.prompt_token_ids),
            cached_tokens=num_cached,
            tokens=sum(self._num_tokens),
            first_token_s=None if first_s is None else round(first_s, 4),
            seconds=round(ended_s - self._call.arrived_s, 4),
            steps=sum(each.num_steps for each in stats) if stats else None,
            drafted=sum(each.num_drafted for each in stats) if stats else None,
            verified=sum(each.num_verified for each in stats) if stats else None,
            accepted=sum(each.num_accepted for each in stats) if stats else None,
            speculation_off_reason=(summary.speculation_off_reason or None) if summary is not None else None,
            error=None if error is None else type(error).__name__,
        )

    @property
    def _first_token_s(self) -> float | None:
        """From arrival to the first token of any choice."""
        first = [each for each in self._first_s if each is not None]
        return min(first) - self._call.arrived_s if first else None

    def _per_token_s(self, choice: int, first_s: float | None) -> float | None:
        num_gaps = self._num_tokens[choice] - 1
        return None if first_s is None or num_gaps < 1 else (self._last_s[choice] - first_s) / num_gaps

    def _record_genai(self, ended_s: float, error_type: str) -> None:
        self._server_metrics.record(
            self._operation,
            self._model,
            duration_s=ended_s - self._call.arrived_s,
            first_token_s=self._first_token_s,
            per_token_s=self._per_token_s(0, self._first_s[0]),
            error=error_type,
        )

    def _end_span(self, error_type: str) -> None:
        if error_type:
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
