"""Logs and OpenTelemetry traces. Off unless configured; then one trace per request spans all four processes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.propagate import extract, inject

from service_kit.settings import CommonSettings


def set_up(service: str, settings: CommonSettings) -> None:
    """Configures logging to standard error, and a tracer provider when `trace_exporter` asks for one."""
    logging.basicConfig(
        level=settings.log_level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s {service} %(levelname)s %(message)s",
    )
    if settings.trace_exporter == "none":
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    exporter: SpanExporter
    if settings.trace_exporter == "console":
        exporter = ConsoleSpanExporter(out=sys.stderr)
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": f"dspark-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def tracer() -> trace.Tracer:
    """The tracer of this process; a no-op one when tracing is off."""
    return trace.get_tracer("dspark")


def to_metadata(context: otel_context.Context | None = None) -> tuple[tuple[str, str], ...]:
    """W3C trace context as gRPC metadata; empty when there is no active span."""
    carrier: dict[str, str] = {}
    inject(carrier, context)
    return tuple(carrier.items())


def from_metadata(metadata: Iterable[tuple[str, Any]] | Mapping[str, str] | None) -> otel_context.Context:
    """Context of a caller, from gRPC metadata or HTTP headers."""
    pairs = metadata.items() if isinstance(metadata, Mapping) else metadata or ()
    return extract({key: value for key, value in pairs if isinstance(value, str)})
