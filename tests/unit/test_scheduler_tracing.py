"""One trace from a request through the steps that serve it, and nothing at all when tracing is off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes.executors import fake_pair
from fakes.rig import Stream, running
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_service import tracing
from scheduler_service.request import GenerateSpec, SamplingOptions
from service_kit import telemetry


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    yield memory
    provider.shutdown()


class _Watched:
    """Forwards to a fake and keeps the metadata of its calls."""

    def __init__(self, fake: Any) -> None:
        self._fake, self.metadata = fake, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)

    def Step(self, request: Any, context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        return self._fake.Step(request, context)


def _greedy(request_id: str) -> GenerateSpec:
    return GenerateSpec(request_id, [1, 2], SamplingOptions(temperature=0.0), max_tokens=6)


def test_a_step_span_is_child_of_the_first_request_and_linked_to_the_others(exporter: InMemorySpanExporter) -> None:
    fake, drafter = fake_pair()
    verifier = _Watched(fake)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    first = tracing.start_request_span("scheduler.generate", (("traceparent", parent),))
    second = tracing.start_request_span("scheduler.generate", ())
    assert first is not None
    assert second is not None
    with running("static", (verifier, drafter)) as rig:  # type: ignore[arg-type]
        streams = [Stream(), Stream()]
        for name, span, stream in zip("ab", (first, second), streams, strict=True):
            rig.scheduler.submit(_greedy(name), stream, span)
        for stream in streams:
            stream.wait()
        first.end()
        second.end()
    spans = exporter.get_finished_spans()
    steps = [span for span in spans if span.name == "scheduler.step"]
    assert len(steps) == len(verifier.metadata) > 0
    ours = {span.get_span_context().span_id: span.get_span_context().trace_id for span in (first, second)}
    assert first.get_span_context().trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    for span, metadata in zip(steps, verifier.metadata, strict=True):
        assert span.parent is not None
        assert ours[span.parent.span_id] == span.context.trace_id
        assert f"{span.context.trace_id:032x}-{span.context.span_id:016x}" in metadata["traceparent"]
    assert any(link.context.span_id in ours for span in steps for link in span.links)


def test_untraced_requests_send_no_metadata() -> None:
    assert tracing.start_request_span("scheduler.generate", ()) is None
    fake, drafter = fake_pair()
    verifier = _Watched(fake)
    with running("static", (verifier, drafter)) as rig:  # type: ignore[arg-type]
        rig.submit([1, 2], 6).wait()
    assert verifier.metadata
    assert not any(verifier.metadata)
    assert not trace.get_current_span().is_recording()
