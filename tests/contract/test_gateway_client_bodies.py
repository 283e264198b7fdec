"""Requests as well-known clients make them: accepted whole, with nothing in them that the gateway does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gateway_harness import GatewayHarness, write_model

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = {"role": "user", "content": "Hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
WEATHER = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}, "strict": None}
PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "temperature": 1, "top_p": 1}
USAGE = {"include_usage": True, "continuous_usage_stats": True}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat page": (CHAT, {"messages": [HI], "stream": True, "user": "42", **PENALTIES}),
    "a title for a chat": (
        CHAT,
        {"messages": [HI], "stream": False, "max_completion_tokens": 50, "metadata": {"task": "t"}},
    ),
    "parts": (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "Ann",
                },
            ]
        },
    ),
    "an agent's second turn": (
        CHAT,
        {
            "messages": [
                HI,
                {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
            ],
            "tools": [{"type": "function", "function": WEATHER}],
            "tool_choice": "auto",
            "parallel_tool_calls": None,
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
        },
    ),
    "every field null": (
        CHAT,
        {
            "messages": [HI],
            **dict.fromkeys(("tools", "tool_choice", "response_format", "stop", "seed", "n", "logit_bias", "logprobs")),
            **dict.fromkeys(
                ("max_tokens", "max_completion_tokens", "stream", "stream_options", "top_logprobs", "user")
            ),
            **dict.fromkeys(("functions", "function_call", "modalities", "audio", "prediction", "store", "metadata")),
            **dict.fromkeys(("reasoning_effort", "service_tier", "web_search_options", "verbosity", *PENALTIES)),
        },
    ),
    "a benchmark's chat": (
        CHAT,
        {
            "messages": [HI],
            "max_completion_tokens": 5,
            "stop": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "a benchmark's completion": (
        COMPLETIONS,
        {"prompt": "Hi", "max_tokens": 5, "stop": None, "ignore_eos": True, "stream": True, "stream_options": USAGE},
    ),
    "an evaluation": (
        COMPLETIONS,
        {"prompt": [[3, 4, 5], [6, 7]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True},
    ),
    "a coding agent's response": (
        RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
            ],
            "tools": [{"type": "function", **WEATHER}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": None,
            "store": False,
            "stream": True,
            "include": [],
            "prompt_cache_key": "k",
            "text": None,
        },
    ),
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    harness = GatewayHarness(write_model(tmp_path_factory.mktemp("model")))
    harness.scheduler.max_model_len = 4000
    with harness:
        yield harness.wait_ready()


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_clients(gateway: GatewayHarness, name: str) -> None:
    path, body = BODIES[name]
    response = gateway.post(path, {"model": "tiny", **body})
    assert response.status_code == 200, response.text
    assert "x-dspark-ignored-parameters" not in response.headers
    assert response.text.endswith("data: [DONE]\n\n") == bool(body.get("stream"))
    assert '"error":{' not in response.text
