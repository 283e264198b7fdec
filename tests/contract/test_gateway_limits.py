"""Deadlines, draining, limits by key, CORS, and health that tells a stall."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from dspark.v1 import gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from gateway_harness import GatewayHarness, ScriptedScheduler, wait_until, write_model

from gateway.errors import RateLimitError
from gateway.key_limits import KeyLimits
from gateway.settings import GatewaySettings

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hasty(model_dir: Path) -> Iterator[GatewayHarness]:
    with GatewayHarness(model_dir, first_token_timeout_s=0.2, generation_timeout_s=0.6) as harness:
        yield harness.wait_ready()


@pytest.mark.parametrize(
    ("first_step_s", "code"), [(30.0, "first_token_timeout"), (0.0, "generation_timeout")], ids=["first", "whole"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_deadlines_end_requests(hasty: GatewayHarness, first_step_s: float, code: str, path: str) -> None:
    hasty.scheduler.__dict__.update(ScriptedScheduler().__dict__)
    hasty.scheduler.first_step_s, hasty.scheduler.is_endless, hasty.scheduler.step_s = first_step_s, True, 0.02
    body = {**CHAT, "prompt": ["a", "b"]}
    whole = hasty.post(path, body)
    assert (whole.status_code, whole.json()["error"]["type"], whole.json()["error"]["code"]) == (504, "timeout", code)
    assert wait_until(lambda: not hasty.scheduler.live)
    parts = hasty.post(path, {**body, "stream": True}).text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    error = json.loads(parts[-3].removeprefix("data: "))["error"]
    assert (error["type"], error["code"], error["param"]) == ("timeout", code, None)
    assert wait_until(lambda: not hasty.scheduler.live)


def test_answers_in_time_are_left_alone(hasty: GatewayHarness) -> None:
    hasty.scheduler.__dict__.update(ScriptedScheduler().__dict__)
    for _ in range(2):
        assert hasty.chat().json()["choices"][0]["message"]["content"] == "Hello, world"
    with grpc.insecure_channel(hasty.grpc_target) as channel:
        hasty.scheduler.first_step_s = 30.0
        with pytest.raises(grpc.RpcError) as caught:
            list(gateway_pb2_grpc.TextServiceStub(channel).GenerateText(gateway_pb2.GenerateTextRequest(prompt="a")))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_running_answers_are_finished_before_the_gateway_ends(model_dir: Path) -> None:
    texts: list[str] = []
    with GatewayHarness(model_dir) as gateway:
        gateway.wait_ready()
        gateway.scheduler.answers, gateway.scheduler.step_s = ["x" * 60], 0.03
        stream = threading.Thread(target=lambda: texts.append(gateway.chat(stream=True).text))
        stream.start()
        assert wait_until(lambda: bool(gateway.scheduler.live))
        assert gateway._loop is not None
        gateway._loop.call_soon_threadsafe(gateway._stop.set)
        with httpx.Client(base_url=gateway.url, trust_env=False) as other:
            assert wait_until(lambda: other.get("/health").status_code == 503)
            health, refused = other.get("/health"), other.post("/v1/chat/completions", json=CHAT)
        for response in (health, refused):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert response.headers["retry-after"] == "1"
        stream.join(10)
    assert texts[0].count("xxx") == 20
    assert texts[0].endswith("data: [DONE]\n\n")


def test_what_does_not_end_is_cut_off(model_dir: Path) -> None:
    with GatewayHarness(model_dir, drain_timeout_s=0) as gateway:
        gateway.wait_ready()
        gateway.scheduler.is_endless, gateway.scheduler.step_s = True, 0.01
        connection = socket.create_connection(("127.0.0.1", gateway.settings.port))
        body = json.dumps({**CHAT, "stream": True})
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    assert not gateway.scheduler.live


def test_health_tells_a_stall(model_dir: Path) -> None:
    harness = GatewayHarness(model_dir, stall_timeout_s=0.5)
    harness.scheduler.load = scheduler_pb2.GetLoadResponse(num_running=1, num_committed=7)
    with harness as gateway:
        gateway.wait_ready()
        assert wait_until(lambda: gateway.get("/health/ready").status_code == 503, 10.0)
        assert gateway.get("/health").json()["error"]["code"] == "stalled"
        assert gateway.get("/health/live").status_code == 200
        assert gateway.chat().status_code == 200
        gateway.scheduler.load.num_committed += 1
        assert wait_until(lambda: gateway.get("/health/ready").status_code == 200, 10.0)


def test_requests_of_a_key_at_once_are_limited(model_dir: Path) -> None:
    with GatewayHarness(model_dir, api_keys="k1,k2", key_max_concurrent=1) as gateway:
        gateway.wait_ready()
        gateway.scheduler.is_endless, gateway.scheduler.step_s = True, 0.01
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        with gateway.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=mine) as first:
            assert first.status_code == 200
            refused = gateway.post("/v1/completions", {"prompt": "a"}, headers=mine)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_concurrent_requests")
            assert refused.headers["retry-after"] == "1"
            with grpc.insecure_channel(gateway.grpc_target) as channel:
                call = gateway_pb2_grpc.TextServiceStub(channel).GenerateText(
                    gateway_pb2.GenerateTextRequest(prompt="a"), metadata=(("authorization", "Bearer k1"),)
                )
                with pytest.raises(grpc.RpcError) as caught:
                    list(call)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert gateway.get("/v1/models", headers=mine).status_code == 200
            assert gateway.post("/tokenize", {"prompt": "a"}, headers=other).status_code == 200
        assert wait_until(lambda: gateway.post("/tokenize", {"prompt": "a"}, headers=mine).status_code == 200)


def test_requests_a_minute_are_limited(model_dir: Path) -> None:
    with GatewayHarness(model_dir, key_requests_per_minute=2) as gateway:
        gateway.wait_ready()
        assert [gateway.post("/tokenize", {"prompt": "a"}).status_code for _ in range(3)] == [200, 200, 429]
        refused = gateway.chat()
        assert refused.json()["error"] == {
            "message": "this API key may start 2 requests a minute",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert 1 <= int(refused.headers["retry-after"]) <= 30


def test_the_minute_is_refilled_steadily() -> None:
    now = 0.0
    limits = KeyLimits(GatewaySettings(key_requests_per_minute=6), clock=lambda: now)

    def start(key: bytes = b"a") -> int:
        try:
            with limits.request(key):
                return 0
        except RateLimitError as error:
            return error.retry_after_s

    assert [start() for _ in range(7)] == [0] * 6 + [10]
    assert start(b"b") == 0
    now = 9.0
    assert start() == 1
    now = 10.5
    assert [start(), start()] == [0, 10]
    now = 1e6
    assert [start() for _ in range(7)] == [0] * 6 + [10]


ORIGIN = {"Origin": "https://chat.example.com"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_no_cors_unless_it_is_set(model_dir: Path) -> None:
    with GatewayHarness(model_dir, api_keys="k") as gateway:
        gateway.wait_ready()
        for response in (
            gateway.http.options("/v1/chat/completions", headers=PREFLIGHT),
            gateway.get("/health", headers=ORIGIN),
        ):
            assert not [name for name in response.headers if name.startswith("access-control")]
        assert gateway.http.options("/v1/chat/completions", headers=PREFLIGHT).status_code == 401


def test_cors_lets_named_origins_in_and_nothing_past_the_keys(model_dir: Path) -> None:
    with GatewayHarness(model_dir, api_keys="k", cors_origins=" https://chat.example.com ,https://b") as gateway:
        gateway.wait_ready()
        preflight = gateway.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        assert "access-control-allow-credentials" not in preflight.headers
        assert not gateway.scheduler.requests
        for headers in (ORIGIN, {**ORIGIN, "Access-Control-Request-Method": "POST"}):  # the latter is no preflight
            refused = gateway.post("/v1/chat/completions", CHAT, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == ORIGIN["Origin"]
        answered = gateway.post("/v1/chat/completions", CHAT, headers={**ORIGIN, "Authorization": "Bearer k"})
        assert answered.status_code == 200
        assert "x-request-id" in answered.headers["access-control-expose-headers"]
        stranger = {**PREFLIGHT, "Origin": "https://evil.example.com"}
        assert "access-control-allow-origin" not in gateway.http.options("/v1/models", headers=stranger).headers
        assert gateway.http.options("/v1/models", headers=ORIGIN).status_code == 401
