"""A bare HTTP client: 1,000 bad requests beside running streams, and /health while the server is full."""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from bad_requests import Bad, bad_requests
from server_options import Server

NUM_BAD, NUM_BUSY = 1000, 16
STREAMS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.9, "seed": 5, "n": 2},
]
"""One greedy, one seeded."""


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {server.api_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=300, trust_env=False) as client:
        yield client


def read(http: httpx.Client, fields: dict[str, Any]) -> list[Any]:
    """All choices of one long stream, chunk by chunk."""
    messages = [{"role": "user", "content": "Tell a story about a ship and a storm."}]
    body = {"messages": messages, "max_tokens": 400, "ignore_eos": True, "stream": True, **fields}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    texts: dict[int, list[Any]] = collections.defaultdict(list)
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        scores = (choice.get("logprobs") or {}).get("content") or ()
        texts[choice["index"]].append((choice["delta"].get("content") or "", list(scores), choice["finish_reason"]))
    return [
        ("".join(text for text, _, _ in pieces), [score for _, scores, _ in pieces for score in scores], pieces[-1][2])
        for _, pieces in sorted(texts.items())
    ]


def send(http: httpx.Client, server: Server, bad: Bad | bytes) -> tuple[str, int]:
    """Kind and status; 0 for connections that were not answered."""
    if isinstance(bad, bytes):
        address = httpx.URL(server.url)
        connection = socket.create_connection((address.host, address.port or 80), timeout=10)
        with connection, contextlib.suppress(OSError):  # cut by the server, which is as good an answer as any
            connection.sendall(bad)
        return "no HTTP, or left at once", 0
    headers = bad.headers if bad.headers or bad.is_authorized else (("authorization", ""),)
    reply = http.request(bad.method, bad.path, content=bad.body or None, headers=dict(headers))
    assert 400 <= reply.status_code < 500, (bad, reply.text)
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}, (bad, reply.text)
    return bad.kind, reply.status_code


def test_bad_requests_change_nothing_in_running_streams(http: httpx.Client, server: Server) -> None:
    quiet = [read(http, fields) for fields in STREAMS]
    done = threading.Event()
    rounds = []

    def stream(index: int) -> None:
        while not done.is_set():
            rounds.append((index, read(http, STREAMS[index])))

    with ThreadPoolExecutor(len(STREAMS)) as streams, ThreadPoolExecutor(4) as senders:
        running = [streams.submit(stream, index) for index in range(len(STREAMS))]
        try:
            results = list(senders.map(lambda bad: send(http, server, bad), bad_requests(server.api_key, NUM_BAD)))
        finally:
            done.set()
        for each in running:
            each.result()
    assert {index for index, _ in rounds} == set(range(len(STREAMS)))
    assert all(choices == quiet[index] for index, choices in rounds)
    for (kind, status), count in sorted(collections.Counter(results).items()):
        print(f"{count:4} {kind}: {status or 'connection closed'}")
    print(f"{len(results)} bad requests, {len(rounds)} streams beside them, each as in quiet")
    server.wait_idle()
    assert http.get("/health").status_code == 200


def test_health_answers_while_the_server_is_full(http: httpx.Client, server: Server) -> None:
    with contextlib.ExitStack() as streams:
        for number in range(NUM_BUSY):
            messages = [{"role": "user", "content": f"Tell a long story about {number} ships."}]
            body = {"messages": messages, "max_tokens": 1000, "ignore_eos": True, "stream": True}
            streams.enter_context(http.stream("POST", "/v1/chat/completions", json=body))
        deadline = time.monotonic() + 60
        while server.metric("vllm:num_requests_running") < NUM_BUSY:
            assert time.monotonic() < deadline
        seconds = []
        for _ in range(200):
            started = time.perf_counter()
            assert http.get("/health").status_code == 200
            seconds.append(time.perf_counter() - started)
            time.sleep(0.02)
        assert server.metric("vllm:num_requests_running") == NUM_BUSY
    cuts = statistics.quantiles(seconds, n=100)
    words = ", ".join(
        f"{name} {1e3 * value:.1f} ms" for name, value in zip(("p50", "p99"), (cuts[49], cuts[98]), strict=True)
    )
    print(f"/health beside {NUM_BUSY} running requests: {words}, worst {1e3 * max(seconds):.1f} ms of {len(seconds)}")
    server.wait_idle()
