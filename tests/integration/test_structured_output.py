"""Structured output and tools through real processes: always valid, and the same with speculation on or off."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import openai
import pytest

from launcher.stack import RunningServer

pytestmark = pytest.mark.model

NUM_SCHEMAS = 6
OFF: Any = {"speculation": {"enabled": False}}


@pytest.fixture
def client(server: RunningServer) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose JSON is short."""
    kinds = ["string", "integer", "boolean", "enum", "nullable"] + ["array", "object"] * (depth < 2)
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(3, 12)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-9, 9), "maximum": rng.randint(10, 500)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", "blue", 1, 2.5, None, True], rng.randint(1, 4))}
    if kind == "nullable":
        return {"anyOf": [{"type": "null"}, random_schema(rng, 2)]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(1, 3)}
    if kind == "boolean":
        return {"type": "boolean"}
    names = rng.sample(["name", "size", "colour", "parts", "é", "is_new"], rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def streamed(client: openai.OpenAI, schema: dict[str, Any], **fields: Any) -> tuple[str, str]:
    """Text and finish reason."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    stream = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Describe a thing you like as JSON."}],
        response_format=form,
        max_tokens=200,
        stream=True,
        **fields,
    )
    text, reason = "", ""
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def test_random_schemas(client: openai.OpenAI) -> None:
    rng = random.Random(11)
    for index in range(NUM_SCHEMAS):
        schema = random_schema(rng)
        sampling = {"temperature": 0} if index % 2 else {"temperature": 1, "seed": index}
        on, off = streamed(client, schema, **sampling), streamed(client, schema, extra_body=OFF, **sampling)
        assert on == off
        assert on[1] == "stop"
        jsonschema.validate(json.loads(on[0]), schema)


def test_tools(client: openai.OpenAI) -> None:
    cities = {"type": "string", "enum": ["Paris", "Rome"]}
    parameters = {"type": "object", "properties": {"city": cities}, "required": ["city"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    request: Any = {
        "model": "",
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": tools,
        "temperature": 0,
        "parallel_tool_calls": False,
        "max_tokens": 60,
    }
    found = []
    for extra in (None, OFF):
        answer = client.chat.completions.create(tool_choice="required", extra_body=extra, **request).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.tool_calls is not None
        found += [call.function for call in answer.message.tool_calls if call.type == "function"]
    with client.chat.completions.stream(tool_choice="required", **request) as stream:
        found += [call.function for call in stream.get_final_completion().choices[0].message.tool_calls or ()]
    assert len(found) == 3
    assert {function.name for function in found} == {"weather"}
    assert len({function.arguments for function in found}) == 1
    jsonschema.validate(json.loads(found[0].arguments), parameters)
    plain = client.chat.completions.create(extra_body=OFF, **{**request, "max_tokens": 20}).choices[0].message
    free = client.chat.completions.create(**{**request, "max_tokens": 20}).choices[0].message
    assert (plain.content, plain.tool_calls) == (free.content, free.tool_calls)


def test_a_schema_that_cannot_be_kept_is_refused(client: openai.OpenAI) -> None:
    for schema in ({"type": "object", "not": {"required": ["a"]}}, {"type": "strin"}, {"$ref": "http://127.0.0.1/x"}):
        with pytest.raises(openai.BadRequestError) as refused:
            streamed(client, schema)
        assert refused.value.param == "response_format"
