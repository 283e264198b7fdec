"""OpenTelemetry traces and metrics. Off unless configured; then one trace per request spans all four processes.

A collector that is away costs what it should have got and nothing else: exporters have threads of their own, and the
end of the process waits for them for a moment only.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import metrics, trace
from opentelemetry.propagate import extract, inject

from service_kit.logs import set_up_logs
from service_kit.settings import CommonSettings

_EXIT_S = 2.0
"""Longest that the end of a process waits for a collector."""


def set_up(service: str, settings: CommonSettings) -> None:
    """Configures logs, a tracer provider if `trace_exporter` asks for one, and a meter provider if `metrics_exporter`
    does."""
    set_up_logs(service, settings.log_level, settings.log_format)
    shut_downs: list[Callable[[], None]] = []
    if settings.trace_exporter != "none":
        shut_downs.append(_set_up_traces(service, settings.trace_exporter))
    if settings.metrics_exporter == "otlp":
        shut_downs.append(_set_up_metrics(service))
    if shut_downs:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # what it tries again is no news
        _call_at_exit(shut_downs)


def _set_up_traces(service: str, exporter_name: str) -> Callable[[], None]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    exporter: SpanExporter
    if exporter_name == "console":
        exporter = ConsoleSpanExporter(out=sys.stderr)
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    shut_down: Callable[[], None] = provider.shutdown
    return shut_down


def _set_up_metrics(service: str) -> Callable[[], None]:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    provider = MeterProvider([reader], resource=_resource(service), shutdown_on_exit=False)
    metrics.set_meter_provider(provider)
    shut_down: Callable[[], None] = provider.shutdown
    return shut_down


def _call_at_exit(shut_downs: list[Callable[[], None]]) -> None:
    """Exports what is left, unless the collector takes too long: its client tries again for ten seconds and more. The
    thread for that starts now, since none can any more when the interpreter ends."""
    is_ending = threading.Event()

    def run() -> None:
        is_ending.wait()
        for shut_down in shut_downs:
            shut_down()

    thread = threading.Thread(target=run, name="last-export", daemon=True)
    thread.start()

    def end() -> None:
        is_ending.set()
        thread.join(_EXIT_S)

    atexit.register(end)


def _resource(service: str) -> Any:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": f"dspark-{service}"})


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
