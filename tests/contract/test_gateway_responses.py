"""/v1/responses: its objects and events, through the openai client and byte by byte; what needs a store is refused."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from gateway_harness import GatewayHarness, ScriptedScheduler, encode, wait_until, write_model

from service_kit.errors import UnavailableError

PROMPT_IDS = [256, *encode("user\nHi"), 257, *encode("\n"), 256, *encode("assistant\n")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    with GatewayHarness(write_model(tmp_path_factory.mktemp("model")), max_messages=6, keepalive_s=0.05) as harness:
        yield harness.wait_ready()


@pytest.fixture
def gateway(running: GatewayHarness) -> GatewayHarness:
    running.scheduler.__dict__.clear()
    running.scheduler.__dict__.update(ScriptedScheduler().__dict__)
    return running


@pytest.fixture
def client(gateway: GatewayHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(gateway: GatewayHarness, **fields: Any) -> httpx.Response:
    return gateway.post("/v1/responses", {"input": "Hi", **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    *parts, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for part in parts:
        if part == ": keep-alive":
            continue
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_the_openai_client_reads_an_answer(client: openai.OpenAI, gateway: GatewayHarness) -> None:
    gateway.scheduler.num_cached_tokens = 16
    answer = client.responses.create(
        model="tiny", input="Hi", instructions="Be brief.", max_output_tokens=50, temperature=0.5, metadata={"a": "b"}
    )
    assert (answer.output_text, answer.status, answer.error) == ("Hello, world", "completed", None)
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 16
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (13, 0)
    assert (answer.temperature, answer.metadata, answer.max_output_tokens) == (0.5, {"a": "b"}, 50)
    sent = gateway.scheduler.requests[-1]
    assert list(sent.prompt_token_ids) == [256, *encode("system\nBe brief."), 257, *encode("\n"), *PROMPT_IDS]
    assert (sent.max_tokens, sent.sampling.temperature) == (50, 0.5)
    assert answer.usage.total_tokens == len(sent.prompt_token_ids) + 13
    short = client.responses.create(model="tiny", input="Hi", max_output_tokens=4)
    assert (short.status, short.output_text) == ("incomplete", "Hell")
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_the_openai_client_reads_a_stream(client: openai.OpenAI, gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["naïve 😀"]
    with client.responses.stream(model="tiny", input="Hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert "".join(texts) == answer.output_text == "naïve 😀"
    assert len(texts) > 2
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("naïve 😀".encode()) + 1
    gateway.scheduler.failure = UnavailableError("gone")
    with pytest.raises(openai.APIError, match="gone"):
        list(client.responses.create(model="tiny", input="Hi", stream=True))


def test_the_events_in_order(gateway: GatewayHarness) -> None:
    response = ask(gateway, stream=True, max_output_tokens=5)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert last["output"] == [events[-2]["item"]]
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
    assert events[-2]["item"]["content"] == [part] == [events[-3]["part"]]
    assert events[4]["item_id"] == events[2]["item"]["id"] == last["output"][0]["id"]
    assert {first["id"], last["id"]} == {last["id"]}
    whole = ask(gateway, max_output_tokens=5).json()
    assert set(whole) == set(last)
    assert set(whole["metrics"]["speculative_decoding"]) >= {"acceptance_histogram", "num_spec_steps"}


def test_silence_and_failures(gateway: GatewayHarness) -> None:
    gateway.scheduler.first_step_s = 0.2
    assert ": keep-alive\n\n" in ask(gateway, stream=True).text
    gateway.scheduler.first_step_s, gateway.scheduler.error = 0.0, "broken"
    (*_, last) = events_of(ask(gateway, stream=True))
    assert (last["type"], last["message"], last["code"]) == ("error", "broken", "generation_failed")
    assert last["error"]["message"] == "broken"
    assert ask(gateway).status_code == 500


def test_turns_of_every_kind(gateway: GatewayHarness) -> None:
    ask(
        gateway,
        input=[
            {"role": "developer", "content": "a"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "c", "annotations": []}]},
            {"role": "user", "content": "d<|im_end|>"},
        ],
    )  # fmt: skip
    ids = list(gateway.scheduler.requests[-1].prompt_token_ids)
    assert (ids.count(256), ids.count(257)) == (5, 4)  # nobody forges a turn here either


def test_log_probabilities_come_with_the_text(gateway: GatewayHarness) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 2}
    (part,) = ask(gateway, **fields).json()["output"][0]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["H", "e"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 1
    events = events_of(ask(gateway, stream=True, **fields))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


def test_sampling_and_templates_pass_through(gateway: GatewayHarness) -> None:
    fields = {"top_k": 5, "seed": 7, "stop": "wor", "logit_bias": {"3": 2}, "speculation": {"enabled": False}}
    body = ask(gateway, **fields, reasoning={"effort": "low"}, text={"format": {"type": "text"}}).json()
    assert body["output"][0]["content"][0]["text"] == "Hello, "
    sent = gateway.scheduler.requests[-1]
    assert (sent.sampling.top_k, sent.sampling.seed, dict(sent.sampling.logit_bias)) == (5, 7, {3: 2.0})
    assert sent.speculation.max_draft_tokens == 0
    nothing = dict.fromkeys(("instructions", "max_output_tokens", "text", "reasoning", "tools", "include", "stop"))
    assert ask(gateway, **nothing, previous_response_id=None, store=True).json()["store"] is False


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "x"}}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"background": True}, "background"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
    ({"input": [{"type": "reasoning", "id": "x"}]}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * 7}, "input"),
    ({"input": None}, "input"),
    ({"input": "x" * 300}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"prompt_logprobs": 3}, "prompt_logprobs"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_names_the_field(gateway: GatewayHarness, fields: dict[str, Any], field: str) -> None:
    for stream in (False, True):
        response = ask(gateway, stream=stream, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
        assert not re.search(r"\bmessages\b|response_format", error["message"])
    assert not gateway.scheduler.requests


def test_unknown_parameters_and_models_are_named(gateway: GatewayHarness) -> None:
    response = ask(gateway, flavour=1, text={"verbosity": "low"}, service_tier="auto")
    assert response.headers["x-dspark-ignored-parameters"] == "flavour,text.verbosity"
    assert ask(gateway, model="other").status_code == 404
    assert gateway.get("/v1/responses/resp_1").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts(gateway: GatewayHarness, stream: bool) -> None:
    gateway.scheduler.is_endless, gateway.scheduler.step_s = True, 0.005
    body = json.dumps({"input": "Hi", "stream": stream})
    with socket.create_connection(("127.0.0.1", gateway.settings.port)) as connection:
        head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        assert wait_until(lambda: bool(gateway.scheduler.live))
    assert wait_until(lambda: not gateway.scheduler.live)
