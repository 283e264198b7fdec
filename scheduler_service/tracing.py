"""Spans of requests and of the steps that serve them. Costs nothing for requests that are not traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace

from service_kit import telemetry

if TYPE_CHECKING:
    from scheduler_service.request import Summary
    from scheduler_service.step_plan import PlannedRow
    from scheduler_service.transport import Metadata


def start_request_span(name: str, metadata: Metadata) -> trace.Span | None:
    """A span under the caller's context; None when nothing is recorded. The caller ends it."""
    span = telemetry.tracer().start_span(name, telemetry.from_metadata(metadata), kind=trace.SpanKind.SERVER)
    return span if span.is_recording() else None


def describe_end(span: trace.Span, request_id: str, summary: Summary) -> None:
    """Adds what came of a request to its span."""
    choices = summary.choices
    span.set_attributes(
        {
            "dspark.request_id": request_id,
            "dspark.cached_tokens": summary.num_cached_tokens,
            "dspark.tokens": sum(choice.num_tokens for choice in choices),
            "dspark.steps": sum(choice.num_steps for choice in choices),
            "dspark.drafted": sum(choice.num_drafted for choice in choices),
            "dspark.verified": sum(choice.num_verified for choice in choices),
            "dspark.accepted": sum(choice.num_accepted for choice in choices),
        }
    )
    if summary.speculation_off_reason:
        span.set_attribute("dspark.speculation_off_reason", summary.speculation_off_reason)


@contextmanager
def step_span(rows: list[PlannedRow], step_id: int) -> Iterator[Metadata]:
    """Trace metadata for the calls of a step.

    When rows of traced requests take part, a span is opened as child of the first one's and linked to the others', so
    that each of their traces leads to the step.
    """
    spans = {id(span): span for row in rows if (span := row.sequence.request.span) is not None}
    if not spans:
        yield ()
        return
    first, *others = spans.values()
    with telemetry.tracer().start_as_current_span(
        "scheduler.step",
        trace.set_span_in_context(first),
        links=[trace.Link(other.get_span_context()) for other in others],
        attributes={"dspark.step_id": step_id, "dspark.num_rows": len(rows)},
    ) as span:
        yield telemetry.to_metadata(trace.set_span_in_context(span))
