"""Bad requests of every kind beside a running stream, and deadlines over gRPC to the scheduler."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from dspark.v1 import scheduler_pb2_grpc
from gateway_harness import GatewayHarness, ScriptedScheduler, wait_until, write_model
from grpc_health.v1 import health_pb2

from gateway.scheduler_client import SCHEDULER_SERVICE, GrpcScheduler
from service_kit.rpc import async_server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
GENERATION = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
BODIES: list[Any] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"\xff\xfe"',
    b'{"messages": "\\ud800"}',
    b"[" * 2000,
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b"x" * 60_000,
    *({name: value} for name in ("messages", "prompt", "input", "tokens") for value in (None, 5, [], [None], [[]], {})),
    {**CHAT, "prompt": "a", "input": "a", "temperature": "hot"},
    {**CHAT, "prompt": "a", "input": "a", "max_tokens": -1, "max_output_tokens": -1},
    {**CHAT, "prompt": "a", "input": "a", "stop": ["x" * 1000]},
    {**CHAT, "prompt": "a", "input": "a", "logit_bias": {"x": 1}},
    {**CHAT, "prompt": "a", "input": "a", "chat_template": "{{ 1 }}"},
    {**CHAT, "prompt": "a", "input": "a", "chat_template_kwargs": {"messages": 1}, "best_of": 7},
    {**CHAT, "prompt": "a", "input": "a", "model": "\u0000"},
    {"messages": [{"role": "user", "content": "x" * 5000}], "prompt": "x" * 5000, "input": "x" * 5000},
    {"messages": [{"role": "user", "content": [{"type": "text"}] * 9}], "prompt": ["a"] * 99, "input": [{}] * 9},
]
PATHS = (*GENERATION, "/tokenize", "/detokenize", "/v1/models", "/nothing", "/v1/chat/completions/../x", "/health")


def test_bad_requests_change_nothing_in_a_running_stream(tmp_path: Path) -> None:
    with GatewayHarness(write_model(tmp_path), max_body_bytes=50_000) as gateway:
        gateway.wait_ready()
        gateway.scheduler.answers, gateway.scheduler.step_s = ["x" * 15], 0.02
        gateway.scheduler.is_endless = True
        texts: list[str] = []
        stream = threading.Thread(target=lambda: texts.append(gateway.chat(stream=True).text))
        stream.start()
        assert wait_until(lambda: bool(gateway.scheduler.live))
        statuses: dict[int, int] = {}
        with httpx.Client(base_url=gateway.url, trust_env=False, timeout=10) as client, ThreadPoolExecutor(4) as pool:

            def send(path: str, body: Any) -> None:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                response = client.post(path, content=content)
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                if response.status_code != 200:  # e.g. a chat beside a prompt that is none
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}, (path, body)
                    assert response.status_code in (400, 404, 405, 413), (path, body, response.text)

            list(pool.map(lambda case: send(*case), [(path, body) for path in PATHS for body in BODIES]))
        gateway.scheduler.is_endless = False
        stream.join(20)
        assert {400, 404, 405, 413} <= set(statuses)
        text = "".join(part.split('"')[0] for part in texts[0].split('"content":"')[1:])
        assert text == "x" * len(text)
        assert len(text) % 15 == 0
        assert len(text) > 15
        assert texts[0].endswith("data: [DONE]\n\n")
        assert wait_until(lambda: not gateway.scheduler.live)
        assert gateway.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_cancels_the_call_to_the_scheduler(tmp_path: Path, stream: bool) -> None:
    scheduler, address = ScriptedScheduler(), f"unix:{tmp_path}/scheduler.sock"
    scheduler.first_step_s = 30.0
    started = []

    def client() -> GrpcScheduler:
        server, health = async_server(
            SCHEDULER_SERVICE,
            address,
            lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server),
            max_message_bytes=2**20,
        )

        async def start() -> None:
            await server.start()
            await health.set(SCHEDULER_SERVICE, health_pb2.HealthCheckResponse.SERVING)

        started.extend((server, asyncio.ensure_future(start())))
        return GrpcScheduler(address)

    with GatewayHarness(write_model(tmp_path / "m"), scheduler=client, first_token_timeout_s=0.2) as gateway:
        gateway.wait_ready()
        response = gateway.chat(stream=stream)
        assert response.status_code == (200 if stream else 504)
        assert "first_token_timeout" in response.text
        assert response.text.endswith("data: [DONE]\n\n") == stream
        assert wait_until(lambda: not scheduler.live)
        assert gateway._loop is not None
        asyncio.run_coroutine_threadsafe(started[0].stop(0), gateway._loop).result()
