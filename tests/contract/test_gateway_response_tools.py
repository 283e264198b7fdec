"""Tools in /v1/responses: items in, items out, and their events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from gateway_harness import GatewayHarness, ScriptedScheduler, tiny_tokenizer, write_model

from gateway.tools.form import call_text

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = call_text("weather", '{"city": "Köln"}')


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    harness = GatewayHarness(write_model(tmp_path_factory.mktemp("model")))
    harness.scheduler.max_model_len = 2000
    with harness:
        yield harness.wait_ready()


@pytest.fixture
def gateway(running: GatewayHarness) -> GatewayHarness:
    running.scheduler.__dict__.update(ScriptedScheduler().__dict__)
    return running


@pytest.fixture
def client(gateway: GatewayHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def ask(gateway: GatewayHarness, **fields: Any) -> Any:
    return gateway.post("/v1/responses", {"input": "Hi", **fields})


def test_items_of_a_whole_answer(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [f"Well.{CALL}\n{CALL}"]
    body = ask(gateway, tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True).json()
    message, *calls = body["output"]
    assert message["content"] == [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]
    assert [{key: call[key] for key in ("type", "name", "arguments", "status")} for call in calls] == [
        {"type": "function_call", "name": "weather", "arguments": '{"city": "Köln"}', "status": "completed"}
    ] * 2
    assert len({call[key] for call in calls for key in ("id", "call_id")}) == 4
    assert (body["status"], body["tools"], body["tool_choice"]) == ("completed", [WEATHER], "auto")
    short = ask(gateway, tools=[WEATHER], max_output_tokens=60).json()
    assert [item["status"] for item in short["output"]] == ["completed", "incomplete"]
    gateway.scheduler.answers = [""]
    assert [item["type"] for item in ask(gateway, tools=[WEATHER]).json()["output"]] == ["message"]


def test_events_of_text_and_a_call(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [f"Well.{CALL}"]
    response = ask(gateway, stream=True, tools=[WEATHER])
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    shown = [f"{e['type'].removeprefix('response.')} {e.get('output_index', '')}{e.get('delta', '')}" for e in events]
    assert shown == [
        "created ",
        "in_progress ",
        "output_item.added 0",
        "content_part.added 0",
        "output_text.delta 0Wel",
        "output_text.delta 0l.",
        "output_text.done 0",
        "content_part.done 0",
        "output_item.done 0",
        "output_item.added 1",
        *[f"function_call_arguments.delta 1{text}" for text in ("{", '"ci', 'ty"', ': "', "Kö", 'ln"', "}")],
        "function_call_arguments.done 1",
        "output_item.done 1",
        "completed ",
    ]
    assert [e["item"]["status"] for e in events if "item" in e] == ["in_progress", "completed"] * 2
    call = events[-1]["response"]["output"][1]
    assert call == events[-2]["item"]
    assert {e["item_id"] for e in events if "arguments" in e["type"]} == {call["id"]}


class Weather(pydantic.BaseModel):
    """What `parse` asks for."""

    city: str


def test_openai_client_calls_a_tool_and_answers_it(client: openai.OpenAI, gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [f"Well.{CALL}"]
    with client.responses.stream(model="tiny", input="Weather?", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    call = answer.output[1]
    assert call.type == "function_call"
    assert call.arguments == '{"city": "Köln"}'
    items: list[Any] = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump(exclude_none=True) for item in answer.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"},
    ]
    choice: Any = {"type": "function", "name": "weather"}
    client.responses.create(model="tiny", input=items, tools=[WEATHER], tool_choice=choice)
    prompt = tiny_tokenizer().decode(list(gateway.scheduler.requests[-1].prompt_token_ids), skip_special_tokens=False)
    assert f"assistant\nWell.{CALL}<|im_end|>" in prompt
    assert "user\n<tool_response>\nRain\n</tool_response><|im_end|>" in prompt
    assert gateway.scheduler.requests[-1].structured_output.lark.startswith('start: "<tool_call>" call')
    gateway.scheduler.answers = ['{"city": "Bonn"}']
    parsed = client.responses.parse(model="tiny", input="Weather?", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Bonn")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "include": ["message.output_text.logprobs"]}, "tools"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "a b", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "a", "arguments": {}}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", str(value))[:50],
)
def test_what_is_refused_names_the_field(gateway: GatewayHarness, fields: dict[str, Any], field: str) -> None:
    response = ask(gateway, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert field in error["message"]
