"""OpenAI's Python client against a real server. What is checked holds for any model: shapes, forms, sums of pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from server_options import Server

QUESTION: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Berlin", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
TOOLS: Any = [WEATHER, CLOCK]
NAMED: Any = {"type": "function", "function": {"name": "clock"}}
KEY_MAX_CONCURRENT = 24
"""Of the server."""


class Call(BaseModel):
    """Arguments of the tool `weather`."""

    city: Literal["Berlin", "Paris"]
    days: int = Field(ge=1, le=9)


class City(BaseModel):
    """What structured answers are asked for."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    size: Literal["small", "large"]
    districts: list[Literal["north", "south"]] = Field(max_length=3)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=300) as client:
        yield client


def greedy(server: Server, **more: Any) -> dict[str, Any]:
    return {"model": server.model, "temperature": 0, "max_tokens": 200, **more}


def test_chat_streamed_and_whole_are_the_same(client: openai.OpenAI, server: Server) -> None:
    fields = greedy(server, messages=QUESTION, max_tokens=32)
    raw = client.chat.completions.with_raw_response.create(**fields)
    assert raw.headers["x-request-id"]
    whole = ChatCompletion.model_validate(json.loads(raw.http_response.text))
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 32
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_asynchronous_client(server: Server) -> None:
    async def answers() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.api_key) as client:

            async def answer() -> str:
                stream = await client.chat.completions.create(
                    **greedy(server, messages=QUESTION, max_tokens=16), stream=True
                )
                return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

            return list(await asyncio.gather(*(answer() for _ in range(3))))

    first, *others = asyncio.run(answers())
    assert first
    assert set(others) == {first}


def test_models(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model


@pytest.mark.parametrize("choice", ["auto", "required", "named", "none"])
def test_tools(client: openai.OpenAI, server: Server, choice: str) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    fields = greedy(server, messages=messages, tools=TOOLS, parallel_tool_calls=False)
    fields["tool_choice"] = NAMED if choice == "named" else choice
    message = client.chat.completions.create(**fields).choices[0].message
    calls: dict[int, dict[str, str]] = {}
    text, reason = "", None
    for chunk in client.chat.completions.create(**fields, stream=True):
        for each in chunk.choices:
            text += each.delta.content or ""
            reason = each.finish_reason or reason
            for delta in each.delta.tool_calls or ():
                call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
                assert delta.function is not None
                call["id"] += delta.id or ""
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
    whole = [
        (call.function.name, call.function.arguments) for call in message.tool_calls or () if call.type == "function"
    ]
    assert [(call["name"], call["arguments"]) for call in calls.values()] == whole
    assert text == (message.content or "")
    assert all(call["id"] for call in calls.values())
    assert (reason == "tool_calls") == bool(calls)
    if choice in ("required", "named"):
        assert len(whole) == 1
    if choice == "named":
        assert whole[0][0] == "clock"
    if choice == "none":
        assert not whole
        assert text
    for name, arguments in whole:
        assert isinstance(json.loads(arguments), dict)
        if name == "weather":
            Call.model_validate_json(arguments)


def test_the_result_of_a_tool_goes_back(client: openai.OpenAI, server: Server) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    fields = greedy(server, tools=TOOLS, parallel_tool_calls=False)
    first = client.chat.completions.create(**fields, messages=messages, tool_choice="required").choices[0].message
    assert first.tool_calls
    result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny, 20 degrees"}
    second = client.chat.completions.create(**fields, messages=[*messages, first, result], tool_choice="none")
    assert second.choices[0].message.content


def test_structured_output(client: openai.OpenAI, server: Server) -> None:
    fields = greedy(server, messages=[{"role": "user", "content": "Describe Paris as JSON."}])
    form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": City.model_json_schema()}}
    plain = client.chat.completions.create(**fields, response_format=form).choices[0].message.content
    parsed = client.chat.completions.parse(**fields, response_format=City).choices[0].message.parsed
    assert City.model_validate_json(plain or "") == parsed
    with client.chat.completions.stream(**fields, response_format=City) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert "content.delta" in kinds
    assert "content.done" in kinds
    any_object = client.chat.completions.create(**fields, response_format={"type": "json_object"})
    if any_object.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(any_object.choices[0].message.content or ""), dict)


def test_a_tool_made_of_a_model(client: openai.OpenAI, server: Server) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    tool = openai.pydantic_function_tool(Call, name="weather")
    reply = client.chat.completions.parse(
        **greedy(server, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    )
    (call,) = reply.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Call)


def test_responses(client: openai.OpenAI, server: Server) -> None:
    fields: Any = {"model": server.model, "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 24}
    raw = client.responses.with_raw_response.create(**fields)
    whole = Response.model_validate(json.loads(raw.http_response.text))
    assert whole.output_text
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    kinds, last = [event.type for event in events], events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    final = last.response
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens <= 24
    assert kinds[0] == "response.created"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    chat = client.chat.completions.create(**greedy(server, messages=QUESTION, max_tokens=24))
    assert chat.choices[0].message.content == whole.output_text


def test_responses_parse_and_tools(client: openai.OpenAI, server: Server) -> None:
    fields: Any = {"model": server.model, "temperature": 0, "max_output_tokens": 200}
    assert isinstance(client.responses.parse(**fields, input="Describe Paris.", text_format=City).output_parsed, City)
    tool = {"type": "function", **WEATHER["function"]}
    question = [{"role": "user", "content": "How is the weather in Paris?"}]
    fields |= {"tools": [tool], "parallel_tool_calls": False}
    first = client.responses.create(**fields, input=question, tool_choice="required")
    (call,) = [item for item in first.output if item.type == "function_call"]
    Call.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(**fields, input=[*question, call, result], tool_choice="none")
    assert second.output_text


def test_completions_with_scores(client: openai.OpenAI, server: Server) -> None:
    fields = greedy(server, prompt="The capital of France is", max_tokens=8, logprobs=3)
    raw = client.completions.with_raw_response.create(**fields)
    Completion.model_validate(json.loads(raw.http_response.text))
    choice = client.completions.create(**fields, echo=True).choices[0]
    scores = choice.logprobs
    assert scores is not None
    assert choice.text.startswith(fields["prompt"])
    assert "".join(scores.tokens or ()) == choice.text
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None
    assert all(score <= 0 for score in scores.token_logprobs[1:])
    assert len(scores.top_logprobs or ()) == len(scores.tokens or ()) == len(scores.text_offset or ())
    streamed = list(client.completions.create(**fields, stream=True))
    assert choice.text == fields["prompt"] + "".join(each.choices[0].text for each in streamed if each.choices)
    chat = client.chat.completions.create(
        **greedy(server, messages=QUESTION, max_tokens=6, logprobs=True, top_logprobs=2)
    ).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    assert "".join(token.token for token in chat.logprobs.content) == chat.message.content
    assert all(len(token.top_logprobs) == 2 for token in chat.logprobs.content)


def test_errors_are_of_their_classes(client: openai.OpenAI, server: Server) -> None:
    fields = greedy(server, messages=QUESTION)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**fields, "model": "gpt-9"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{**fields, "temperature": 9})
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=server.model, prompt="word " * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=server.model, input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="wrong").chat.completions.create(**fields)
    assert stranger.value.code == "invalid_api_key"


def test_too_many_requests_at_once(client: openai.OpenAI, server: Server) -> None:
    fields = greedy(server, messages=QUESTION, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    streams = [client.chat.completions.create(**fields) for _ in range(KEY_MAX_CONCURRENT)]
    try:
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**fields)
        assert refused.value.code == "too_many_concurrent_requests"
        assert int(refused.value.response.headers["retry-after"]) > 0
    finally:
        for stream in streams:
            stream.close()
    server.wait_idle()


@pytest.mark.parametrize("path", ["chat", "completions", "responses"])
def test_an_aborted_stream_frees_the_server(client: openai.OpenAI, server: Server, path: str) -> None:
    limit, body = 1500, {"ignore_eos": True}
    common: Any = {"model": server.model, "temperature": 0, "stream": True, "extra_body": body}
    before = server.metric("vllm:generation_tokens_total")
    if path == "chat":
        stream: Any = client.chat.completions.create(**common, messages=QUESTION, max_tokens=limit)
    elif path == "completions":
        stream = client.completions.create(**common, prompt="Once", max_tokens=limit)
    else:
        stream = client.responses.create(**common, input="Tell a story.", max_output_tokens=limit)
    pieces = iter(stream)
    for _ in range(8):
        next(pieces)
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    server.wait_idle()
    assert server.metric("vllm:generation_tokens_total") - before < limit


def test_a_client_that_does_not_wait_frees_the_server(client: openai.OpenAI, server: Server) -> None:
    body = {"ignore_eos": True}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1).chat.completions.create(
            **greedy(server, messages=QUESTION, max_tokens=1900, extra_body=body)
        )
    server.wait_idle()
