"""The unmodified `openai` client, and clients that vanish."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from bench.measure import Engine
from launcher.stack import RunningServer
from service_kit.handoff import remove_orphans

pytestmark = pytest.mark.model

QUESTION: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]


@pytest.fixture
def client(server: RunningServer) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_streamed_chat_equals_the_whole_answer(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=40, temperature=0)
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= 16  # the prompt was there the second time
    assert whole.choices[0].finish_reason in ("stop", "length")


def test_completions_and_choices(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    reply = client.completions.create(model=model, prompt="Once upon a time", max_tokens=16, n=2, temperature=1, seed=5)
    first, second = (choice.text for choice in reply.choices)
    assert first != second
    alone = client.completions.create(model=model, prompt="Once upon a time", max_tokens=16, temperature=1, seed=5)
    assert alone.choices[0].text == first


def test_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    reply = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=24, temperature=0, stop=["7"])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == " 5, 6, "


def test_unknown_model_names_the_served_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2-135m-instruct"):
        client.chat.completions.create(model="gpt-9", messages=QUESTION)


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="word " * 9000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    assert "9001" in caught.value.message or "9000" in caught.value.message


def _read_two_chunks_and_vanish(url: str) -> int:
    """Returns the number of data chunks seen before the connection was dropped."""
    host, port = url.removeprefix("http://").split(":")
    body = (
        b'{"messages": [{"role": "user", "content": "Write a very long story about a ship."}], '
        b'"stream": true, "max_tokens": 400, "ignore_eos": true, "temperature": 0}'
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while received.count(b"data: ") < 2:
            part = connection.recv(4096)
            if not part:
                break
            received += part
    return received.count(b"data: ")


def test_clients_that_vanish_leave_nothing_behind(server: RunningServer, engine: Engine) -> None:
    """20 clients on 8 slots: the queued ones stream as the first ones are aborted."""
    before = engine.load()
    with ThreadPoolExecutor(20) as pool:
        chunks = list(pool.map(_read_two_chunks_and_vanish, [server.url] * 20))
    assert min(chunks) >= 2
    vanished = time.monotonic()
    while (load := engine.load()).num_running or load.num_waiting or load.num_free_pages < before.num_free_pages:
        # 2 s on an idle machine; the bound is generous because tests may share theirs.
        assert time.monotonic() - vanished < 15, f"still running: {load}"
        time.sleep(0.05)
    print(f"slots and pages were back {time.monotonic() - vanished:.2f} s after the last client left")
    assert (load.num_free_slots, load.num_free_pages) == (before.num_free_slots, before.num_free_pages)
    assert load.num_committed - before.num_committed < 20 * 400 // 2, "aborted requests ran on"
    assert remove_orphans() == []
    assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
