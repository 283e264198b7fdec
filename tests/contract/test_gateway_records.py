"""What the gateway keeps of a request besides its answer: one log line, one span, OpenTelemetry's metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_harness import GatewayHarness, wait_until, write_model
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gateway import generation_record, web
from gateway.genai import ServerMetrics
from gateway.generation_record import GenerationRecord
from gateway.metrics import GatewayMetrics
from gateway.tokens import TokenRequest
from service_kit.errors import QueueFullError

SECRET = "my secret words"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """OTLP metrics as if they were switched on."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr("opentelemetry.metrics.get_meter_provider", lambda: provider)
    yield reader
    provider.shutdown()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    for module in (web, generation_record):
        monkeypatch.setattr(module, "tracer", lambda: provider.get_tracer("test"))
    yield memory
    provider.shutdown()


@pytest.fixture
def gateway(model_dir: Path, caplog: pytest.LogCaptureFixture) -> Iterator[GatewayHarness]:
    caplog.set_level(logging.INFO)
    with GatewayHarness(model_dir) as harness:
        yield harness.wait_ready()


def lines(caplog: pytest.LogCaptureFixture, message: str = "request ended") -> list[dict[str, Any]]:
    """Fields of the lines with this message; no line has anything of the prompt."""
    for record in caplog.records:
        assert SECRET not in record.getMessage()
        assert SECRET not in repr(getattr(record, "fields", ""))
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == message]


def metric_points(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
    return {metric.name: metric.data.data_points for scope in scopes for metric in scope.metrics}


def test_a_finished_request_leaves_one_line(gateway: GatewayHarness, caplog: pytest.LogCaptureFixture) -> None:
    gateway.scheduler.num_cached_tokens = 4
    headers = {"x-request-id": "client-7"}
    body = {"messages": [{"role": "user", "content": SECRET}]}
    response = gateway.post("/v1/chat/completions", body, headers=headers)
    assert response.headers["x-request-id"] == "client-7"
    (line,) = lines(caplog)
    times = line.pop("first_token_s"), line.pop("seconds")
    assert 0 <= times[0] <= times[1]
    assert line == {
        "request_id": gateway.scheduler.requests[0].request_id,
        "call_id": "client-7",
        "operation": "chat",
        "model": "tiny",
        "reasons": ["stop"],
        "prompt_tokens": response.json()["usage"]["prompt_tokens"],
        "cached_tokens": 4,
        "tokens": response.json()["usage"]["completion_tokens"],
        "steps": 2,
        "drafted": 8,
        "verified": 6,
        "accepted": 3,
    }


@pytest.mark.parametrize("given", ["a\nb", "x" * 200, "ü", ""])
def test_a_bad_request_id_is_replaced(given: str, gateway: GatewayHarness, caplog: pytest.LogCaptureFixture) -> None:
    # httpx would refuse some of these itself.
    headers = [(b"x-request-id", given.encode())] if "\n" not in given else [(b"x-request-id", b"a\tb")]
    gateway.post("/v1/completions", {"prompt": "a"}, headers=headers)
    (line,) = lines(caplog)
    assert len(line["call_id"]) == 32
    assert line["call_id"].isalnum()


def test_every_prompt_of_a_call_has_a_line(gateway: GatewayHarness, caplog: pytest.LogCaptureFixture) -> None:
    gateway.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3}, headers={"x-request-id": "call"})
    found = lines(caplog)
    assert [(line["call_id"], line["reasons"], line["tokens"]) for line in found] == [("call", ["length"] * 2, 6)] * 2
    assert {line["request_id"] for line in found} == {each.request_id for each in gateway.scheduler.requests}


def test_an_aborted_request_leaves_one_line(gateway: GatewayHarness, caplog: pytest.LogCaptureFixture) -> None:
    gateway.scheduler.is_endless, gateway.scheduler.step_s = True, 0.01
    body = {"messages": [{"role": "user", "content": SECRET}], "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, trust_env=False) as response:
        next(response.iter_lines())
    assert wait_until(lambda: bool(lines(caplog)))
    assert wait_until(lambda: not gateway.scheduler.live)
    (line,) = lines(caplog)
    assert line["reasons"] == ["abort"]
    assert "error" not in line


def test_a_generation_that_nobody_reads_leaves_one_line(
    gateway: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    # The second prompt is too long, which is found when the first one has been admitted.
    assert gateway.post("/v1/completions", {"prompt": ["a", "b" * 300]}).status_code == 400
    (line,) = lines(caplog)
    assert (line["reasons"], line["tokens"]) == (["abort"], 0)
    (refused,) = lines(caplog, "error response")
    assert refused["call_id"] == line["call_id"]


def test_an_end_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = GatewayMetrics()
    record = GenerationRecord(TokenRequest("a", [1, 2]), "chat", "tiny", metrics, ServerMetrics(MeterProvider([])))
    record.take(0, 1)
    record.take(0, 3)
    record.end(["stop"], None, None)
    record.end([None], None, None)
    assert [line["reasons"] for line in lines(caplog)] == [["stop"]]
    assert metrics.request_s.snapshot()[0][-1][1] == metrics.per_token_s.snapshot()[0][-1][1] == 1


def test_a_failed_request_leaves_one_line(gateway: GatewayHarness, caplog: pytest.LogCaptureFixture) -> None:
    gateway.scheduler.error = "the engine broke"
    assert gateway.chat(SECRET).status_code == 500
    (line,) = lines(caplog)
    assert (line["reasons"], line["error"]) == (["error"], "GenerationFailedError")


def test_refusals_are_told_without_their_words(gateway: GatewayHarness, caplog: pytest.LogCaptureFixture) -> None:
    gateway.post("/v1/chat/completions", {"messages": SECRET})
    gateway.scheduler.refusal = QueueFullError("full")
    gateway.chat(SECRET)
    assert lines(caplog) == []
    told = [(line["handler"], line["status"], line["error"]) for line in lines(caplog, "error response")]
    path = "/v1/chat/completions"
    assert told == [(path, 400, "InvalidRequestError"), (path, 429, "QueueFullError")]


def test_a_generation_is_a_span_below_the_call(
    spans: InMemorySpanExporter, gateway: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    body = {"messages": [{"role": "user", "content": SECRET}], "temperature": 0.5, "seed": 2**64 - 1}
    gateway.post("/v1/chat/completions", body, headers=headers)
    assert wait_until(lambda: len(spans.get_finished_spans()) == 2)
    generation, call = spans.get_finished_spans()
    assert generation.parent is not None
    assert (generation.name, generation.parent.span_id) == ("chat tiny", call.context.span_id)
    assert f"{call.context.trace_id:032x}" == trace_id
    # The scheduler goes on below the generation.
    parent = f"00-{trace_id}-{generation.context.span_id:016x}-01"
    assert gateway.scheduler.metadata[0]["traceparent"] == parent
    attributes = dict(generation.attributes or {})
    request_id = gateway.scheduler.requests[0].request_id
    assert attributes.pop("gen_ai.response.id") == request_id
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dspark",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": gateway.scheduler.requests[0].max_tokens,
        "gen_ai.request.seed": str(2**64 - 1),
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(gateway.scheduler.requests[0].prompt_token_ids),
        "gen_ai.usage.output_tokens": lines(caplog)[0]["tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


def test_refused_generations_end_their_span(spans: InMemorySpanExporter, gateway: GatewayHarness) -> None:
    gateway.scheduler.refusal = QueueFullError("full")
    gateway.chat()
    assert wait_until(lambda: len(spans.get_finished_spans()) == 2)
    generation, _ = spans.get_finished_spans()
    assert generation.status.status_code is StatusCode.ERROR
    assert (generation.attributes or {})["error.type"] == "QueueFullError"


def test_opentelemetry_gets_the_times_of_each_generation(reader: InMemoryMetricReader, gateway: GatewayHarness) -> None:
    gateway.chat(max_tokens=7)
    gateway.scheduler.error = "the engine broke"
    gateway.chat()
    points = metric_points(reader)
    names = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dspark",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
    }
    counts = {name: {tuple(sorted(p.attributes.items())): p.count for p in found} for name, found in points.items()}
    good, bad = (tuple(sorted(each.items())) for each in (names, {**names, "error.type": "GenerationFailedError"}))
    assert counts == {
        "gen_ai.server.request.duration": {good: 1, bad: 1},
        "gen_ai.server.time_to_first_token": {good: 1},
        "gen_ai.server.time_per_output_token": {good: 1},
    }
    assert points["gen_ai.server.request.duration"][0].explicit_bounds[-1] == 81.92
