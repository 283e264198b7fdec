"""Tools and structured output over HTTP: what the scheduler is asked, and what clients get."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pydantic
import pytest
from dspark.v1 import gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from gateway_harness import EOS_ID, GatewayHarness, ScriptedScheduler, encode, tiny_tokenizer, write_model

from gateway.tools.form import call_text
from service_kit.errors import InvalidRequestError

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = call_text("weather", '{"city": "Köln"}')
SECOND = call_text("weather", "{}")
JSON_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


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


def transcript(response: httpx.Response) -> list[str]:
    """The chunks' choices as JSON, with ids made equal."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    choices = [json.dumps(choice, ensure_ascii=False) for event in events for choice in json.loads(event)["choices"]]
    return [re.sub(r"call_[0-9a-f]{24}", "call_0", choice) for choice in choices]


def prompt_of(request: Any) -> str:
    """The prompt of a scheduler's request, without special tokens."""
    return str(tiny_tokenizer().decode(list(request.prompt_token_ids)))


def delta(body: str, finish: str = "null") -> str:
    return f'{{"index": 0, "delta": {{{body}}}, "logprobs": null, "finish_reason": {finish}}}'


def start(call: int, name: str = "weather") -> str:
    function = f'"function": {{"name": "{name}", "arguments": ""}}'
    return delta(f'"tool_calls": [{{"index": {call}, "id": "call_0", "type": "function", {function}}}]')


def arguments(call: int, text: str, finish: str = "null") -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return delta(f'"tool_calls": [{{"index": {call}, "function": {{"arguments": {quoted}}}}}]', finish)


OPENING = delta('"role": "assistant", "content": ""')


def test_the_exact_chunks_of_a_call(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [CALL]
    assert transcript(gateway.chat(stream=True, tools=[WEATHER])) == [
        OPENING,
        start(0),
        arguments(0, '{"c'),
        arguments(0, "ity"),
        arguments(0, '": '),
        arguments(0, '"K'),
        arguments(0, "öln"),
        arguments(0, '"}'),
        delta("", '"tool_calls"'),
    ]


def test_the_exact_chunks_of_text_and_two_calls(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [f"1 < 2{SECOND}\n{SECOND}"]
    assert transcript(gateway.chat(stream=True, tools=[WEATHER])) == [
        OPENING,
        delta('"content": "1 "'),
        delta('"content": "< 2"'),
        start(0),
        arguments(0, "{"),
        arguments(0, "}"),
        start(1),
        arguments(1, "{}"),
        delta("", '"tool_calls"'),
    ]


def test_text_without_a_call_is_streamed_as_ever(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["a <tool> <tool_c"]
    chunks = transcript(gateway.chat(stream=True, tools=[WEATHER]))
    assert "".join(json.loads(chunk)["delta"].get("content", "") for chunk in chunks) == "a <tool> <tool_c"
    assert chunks[-1] == delta('"content": "<tool_c"', '"stop"')


def test_whole_answers(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [CALL, f"Well.{SECOND}\n{SECOND}", "No."]
    choices = gateway.chat(tools=[WEATHER], n=3).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "tool_calls", "stop"]
    messages = [choice["message"] for choice in choices]
    assert [message["content"] for message in messages] == [None, "Well.", "No."]
    assert "tool_calls" not in messages[2]
    calls = [*messages[0]["tool_calls"], *messages[1]["tool_calls"]]
    assert [call["function"] for call in calls] == [
        {"name": "weather", "arguments": '{"city": "Köln"}'},
        *[{"name": "weather", "arguments": "{}"}] * 2,
    ]
    assert len({call["id"] for call in calls}) == 3
    assert {call["type"] for call in calls} == {"function"}


def test_streamed_choices_do_not_mix(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [CALL, f"B{SECOND}", "C"]
    chunks = list(map(json.loads, transcript(gateway.chat(stream=True, tools=[WEATHER], n=3))))
    texts, calls, reasons = ["", "", ""], ["", "", ""], [None] * 3
    for chunk in chunks:
        texts[chunk["index"]] += chunk["delta"].get("content", "")
        for call in chunk["delta"].get("tool_calls", ()):
            calls[chunk["index"]] += call["function"].get("name", "") + call["function"]["arguments"]
        reasons[chunk["index"]] = chunk["finish_reason"]
    assert texts == ["", "B", "C"]
    assert calls == ['weather{"city": "Köln"}', "weather{}", ""]
    assert reasons == ["tool_calls", "tool_calls", "stop"]


@pytest.mark.parametrize("max_tokens", [5, 30, 50, 60])
def test_a_call_cut_short_says_so(gateway: GatewayHarness, max_tokens: int) -> None:
    gateway.scheduler.answers = [CALL]
    choice = gateway.chat(tools=[WEATHER], max_tokens=max_tokens).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    shown = choice["message"]["content"] or choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert shown in CALL
    stopped = gateway.chat(tools=[WEATHER], stop="Köl").json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def test_scores_ids_and_usage_cover_every_token_of_a_call(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [f"A{CALL}"]
    fields: dict[str, Any] = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    token_ids = [*encode(f"A{CALL}"), EOS_ID]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = [
        json.loads(line[6:])
        for line in gateway.chat(stream=True, stream_options=options, **fields).text.split("\n\n")
        if line.startswith("data: {")
    ]
    choices = [choice for event in events for choice in event["choices"]]
    assert [i for choice in choices for i in choice.get("token_ids", ())] == token_ids
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(entries) == len(token_ids)
    assert events[-1]["usage"]["completion_tokens"] == len(token_ids)
    whole = gateway.chat(**fields).json()
    assert whole["choices"][0]["token_ids"] == token_ids
    assert whole["choices"][0]["logprobs"]["content"] == entries
    assert whole["usage"] == events[-1]["usage"]


def test_the_scheduler_gets_the_form_and_the_prompt_the_tools(gateway: GatewayHarness) -> None:
    gateway.chat(tools=[WEATHER])
    gateway.chat(tools=[WEATHER], tool_choice="none")
    gateway.chat(response_format={"type": "json_object"})
    gateway.post("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a+"}})
    called, silent, object_form, regex = gateway.scheduler.requests
    assert "start: TEXT | " in called.structured_output.lark
    assert prompt_of(called).count('{"name":"weather"') == 1
    assert not silent.HasField("structured_output")
    assert len(silent.prompt_token_ids) < 60
    assert json.loads(object_form.structured_output.json_schema)["type"] == "object"
    assert regex.structured_output.regex == "a+"


def test_a_form_that_does_not_compile_is_the_client_s_error(gateway: GatewayHarness) -> None:
    gateway.scheduler.refusal = InvalidRequestError("structured_output: no such type", field="structured_output")
    for field, value in (
        ("response_format", JSON_FORM),
        ("structured_outputs", {"regex": "("}),
        ("tools", [WEATHER]),
    ):
        response = gateway.chat(stream=True, **{field: value})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["message"]) == (field, f"{field}: no such type")


def test_openai_client_calls_tools(client: openai.OpenAI, gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = [f"Let me see. {CALL}\n{SECOND}"]
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    tools: list[Any] = [WEATHER]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=tools, tool_choice="required")
    message = answer.choices[0].message
    assert message.content == "Let me see. "
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls if call.type == "function"] == [
        '{"city": "Köln"}',
        "{}",
    ]
    with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.finish_reason == "tool_calls"
    assert [c.function.arguments for c in final.message.tool_calls or ()] == ['{"city": "Köln"}', "{}"]
    # The answer goes back as it came, with the result behind it.
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain"}]
    client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    prompt = prompt_of(gateway.scheduler.requests[-1])
    assert f"Let me see. {CALL}\n{SECOND}" in prompt
    assert "<tool_response>\nRain\n</tool_response>" in prompt


class City(pydantic.BaseModel):
    """What `parse` asks for."""

    city: str
    inhabitants: int | None = None


def test_openai_client_parses_structured_output(client: openai.OpenAI, gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ['{"city": "Köln", "inhabitants": 1}']
    messages: list[Any] = [{"role": "user", "content": "City?"}]
    parsed = client.chat.completions.parse(model="tiny", messages=messages, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Köln", inhabitants=1)
    schema = json.loads(gateway.scheduler.requests[-1].structured_output.json_schema)
    assert schema["required"] == ["city", "inhabitants"]
    with client.chat.completions.stream(model="tiny", messages=messages, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == City(city="Köln", inhabitants=1)
    gateway.scheduler.answers = [call_text("City", '{"city": "Bonn"}')]
    tool = openai.pydantic_function_tool(City)
    called = client.chat.completions.parse(model="tiny", messages=messages, tools=[tool])
    assert called.choices[0].message.tool_calls is not None
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == City(city="Bonn")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="tiny", messages=messages, tools=[tool], extra_body={"structured_outputs": {"regex": "a"}}
        )
    assert bad.value.param == "tools"


@pytest.mark.parametrize(
    ("kind", "text"), [("json_schema", '{"type":"object"}'), ("regex", "a+"), ("lark", 'start: "a"')]
)
def test_forms_by_grpc(gateway: GatewayHarness, kind: str, text: str) -> None:
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        stub = gateway_pb2_grpc.TextServiceStub(channel)
        form = scheduler_pb2.StructuredOutput(**{kind: text})
        list(stub.GenerateText(gateway_pb2.GenerateTextRequest(prompt="a", structured_output=form)))
        asked = getattr(gateway.scheduler.requests[-1].structured_output, kind)
        assert asked.startswith(text.removesuffix("}"))
        empty = scheduler_pb2.StructuredOutput()
        with pytest.raises(grpc.RpcError, match="give json_schema, regex or lark"):
            list(stub.GenerateText(gateway_pb2.GenerateTextRequest(prompt="a", structured_output=empty)))
