"""What clients get to know of every step: in chunks, in whole answers and in text gRPC."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import grpc
import pytest
from dspark.v1 import gateway_pb2, gateway_pb2_grpc
from gateway_harness import GatewayHarness, write_model

FULL = {
    "drafted": 4,
    "verified": 4,
    "accepted": 2,
    "uncut_accepted": 2,
    "confidences": [0.875, 0.75, 0.5, None],
    "budget": 6,
    "rows": 2,
}
LAST = {**FULL, "accepted": 0, "uncut_accepted": 0}
"""A step that brings one token."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    with GatewayHarness(write_model(tmp_path_factory.mktemp("model"))) as harness:
        yield harness.wait_ready()


def streamed(gateway: GatewayHarness, **fields: object) -> list[dict[str, object]]:
    text = gateway.chat(stream=True, **fields).text
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ") and "[DONE]" not in line]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def test_each_chunk_tells_of_its_step(gateway: GatewayHarness) -> None:
    choices = streamed(gateway, dspark={"pieces": True, "steps": True})
    extras = [choice["dspark"] for choice in choices if "dspark" in choice]
    assert [extra["step"] for extra in extras] == [FULL, FULL, FULL, FULL, LAST]  # type: ignore[index]
    assert extras[0]["pieces"] == [["H", True], ["e", True], ["l", False]]  # type: ignore[index]


def test_a_step_without_text_is_told_as_well(gateway: GatewayHarness) -> None:
    """What a stop string may start with is held back, its step is not."""
    choices = streamed(gateway, dspark={"steps": True}, stop="world!")
    texts = [choice["delta"].get("content", "") for choice in choices[1:]]  # type: ignore[attr-defined]
    assert texts == ["Hel", "lo,", " ", "", "world"]
    assert [choice["dspark"] for choice in choices[1:]] == [{"step": step} for step in [FULL] * 4 + [LAST]]


def test_whole_answers_list_their_steps(gateway: GatewayHarness) -> None:
    extra = gateway.chat(dspark={"steps": True}).json()["choices"][0]["dspark"]
    assert extra == {"steps": [FULL, FULL, FULL, FULL, LAST]}
    both = gateway.chat(dspark={"steps": True, "pieces": True}).json()["choices"][0]["dspark"]
    assert list(both) == ["pieces", "steps"]


def test_nothing_is_asked_of_the_scheduler_unless_the_client_asks(gateway: GatewayHarness) -> None:
    before = len(gateway.scheduler.requests)
    assert "dspark" not in gateway.chat().json()["choices"][0]
    assert list(gateway.chat(dspark={"pieces": True}).json()["choices"][0]["dspark"]) == ["pieces"]
    assert not any(request.report_steps for request in gateway.scheduler.requests[before:])


def test_text_grpc_tells_of_its_steps(gateway: GatewayHarness) -> None:
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        stub = gateway_pb2_grpc.TextServiceStub(channel)  # type: ignore[no-untyped-call]
        chunks = [
            [item.chunk for item in stub.GenerateText(request, timeout=10) if item.HasField("chunk")]
            for request in (
                gateway_pb2.GenerateTextRequest(prompt="Hi", report_steps=True),
                gateway_pb2.GenerateTextRequest(prompt="Hi"),
            )
        ]
    assert [chunk.HasField("step") for chunk in chunks[1]] == [False] * 5
    steps = [chunk.step for chunk in chunks[0]]
    assert [(step.num_drafted, step.num_verified, step.num_accepted) for step in steps] == [(4, 4, 2)] * 4 + [(4, 4, 0)]
    assert [(step.budget, step.num_rows, step.num_uncut_accepted) for step in steps] == [(6, 2, 2)] * 4 + [(6, 2, 0)]
    assert list(steps[0].confidences[:3]) == [0.875, 0.75, 0.5]
    assert math.isnan(steps[0].confidences[3])
