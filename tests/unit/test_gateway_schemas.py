"""Validation of requests: every refusal names its field."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.schemas import NEUTRAL_VALUES, ChatRequest, CompletionRequest, parse_request, unknown_parameters
from gateway.settings import GatewaySettings
from service_kit.errors import InvalidRequestError

SETTINGS = GatewaySettings(max_messages=8, max_prompts=3)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": False}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": "1"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"stop": 7}, "stop"),
    ({"stop": False}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"dspark": {"piece": True}}, "dspark.piece"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": CHAT["messages"] * 9}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": False}, "presence_penalty"),
    ({"frequency_penalty": "x"}, "frequency_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "5"}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"1": 5, "01": 5}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": ["x", " "]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"best_of": 2}, "best_of"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ({"x": [{"y": {"chat_template": "{{ 1 }}"}}]}, "x[0].y.chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(ChatRequest, {**CHAT, **fields}, SETTINGS)
    assert caught.value.field == field
    assert field in caught.value.message or field.endswith("chat_template")


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [""], "", [1, "a"], [[1], []], [-1], [1.5], ["a"] * 4, {"text": "a"}, [True]], ids=str
)
def test_refused_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(CompletionRequest, {"prompt": prompt}, SETTINGS)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]]), (["a", [1]], ["a", [1]])],
    ids=str,
)
def test_prompt_forms(prompt: Any, prompts: list[Any]) -> None:
    assert parse_request(CompletionRequest, {"prompt": prompt}, SETTINGS).prompt == prompts


def test_best_of_is_no_more_than_n() -> None:
    for fields in ({"best_of": 1}, {"n": 2, "best_of": 2}, {"best_of": None}):
        parse_request(CompletionRequest, {"prompt": "a", **fields}, SETTINGS)
    for fields in ({"best_of": 2}, {"n": 2, "best_of": 1}):
        with pytest.raises(InvalidRequestError) as caught:
            parse_request(CompletionRequest, {"prompt": "a", **fields}, SETTINGS)
        assert caught.value.field == "best_of"


def test_nulls_within_objects_are_accepted_too() -> None:
    fields = {
        "stream_options": {"include_usage": None, "continuous_usage_stats": None},
        "speculation": {"enabled": None, "max_draft_tokens": None, "priority": None},
        "dspark": {"pieces": None, "steps": None},
    }
    request = parse_request(ChatRequest, {**CHAT, **fields}, SETTINGS)
    assert request.dspark is not None
    assert request.dspark.pieces is request.dspark.steps is False


def test_missing_parts_are_named() -> None:
    for request_class, field in ((ChatRequest, "messages"), (CompletionRequest, "prompt")):
        with pytest.raises(InvalidRequestError, match="is required") as caught:
            parse_request(request_class, {}, SETTINGS)
        assert caught.value.field == field
    with pytest.raises(InvalidRequestError, match="JSON object"):
        parse_request(ChatRequest, ["Hi"], SETTINGS)


def test_neutral_values_and_nulls_are_accepted() -> None:
    for name, neutral in NEUTRAL_VALUES.items():
        for value in (None, *neutral):
            parse_request(ChatRequest, {**CHAT, name: value}, SETTINGS)
    nothing = dict.fromkeys(set(ChatRequest.model_fields) - {"messages"})
    assert parse_request(ChatRequest, {**CHAT, **nothing}, SETTINGS).sampling().temperature is None


def test_values_are_brought_into_the_schedulers_form() -> None:
    request = parse_request(
        ChatRequest,
        {
            **CHAT,
            "top_k": -1,
            "seed": -1,
            "temperature": 1e-9,
            "max_tokens": 4,
            "max_completion_tokens": 8.0,
            "stop": "a",
            "logit_bias": {"7": 2, "3": -1.5},
            "min_tokens": 2.0,
            "frequency_penalty": 1,
        },
        SETTINGS,
    )
    sampling = request.sampling()
    assert (sampling.top_k, sampling.seed, sampling.temperature) == (0, 2**64 - 1, 0.0)
    assert (request.token_limit, request.stop) == (8, ("a",))
    assert (sampling.logit_bias, sampling.min_tokens) == (((7, 2.0), (3, -1.5)), 2)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1.0, None)


def test_log_probabilities_of_both_endpoints() -> None:
    chat = [{"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 0}]
    assert [parse_request(ChatRequest, CHAT | fields, SETTINGS).num_logprobs for fields in chat] == [None, 0, 20, None]
    completion: list[dict[str, Any]] = [{"logprobs": False}, {}, {"logprobs": 0}, {"logprobs": 5, "echo": True}]
    parsed = [parse_request(CompletionRequest, {"prompt": "a"} | fields, SETTINGS) for fields in completion]
    assert [(request.num_logprobs, request.echoes) for request in parsed] == [
        (None, False),
        (None, False),
        (0, False),
        (5, True),
    ]
    for fields, field in (({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"echo": 1}, "echo")):
        with pytest.raises(InvalidRequestError) as caught:
            parse_request(CompletionRequest, {"prompt": "a"} | fields, SETTINGS)
        assert caught.value.field == field


def test_messages_are_tolerant_where_clients_are_sloppy() -> None:
    request = parse_request(
        ChatRequest,
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
                {"role": "tool", "content": "4", "tool_call_id": "x"},
                {"role": "user", "content": "Hi", "name": "Ann"},
            ]
        },
        SETTINGS,
    )
    assert request.template_messages() == [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "4", "tool_call_id": "x"},
        {"role": "user", "content": "Hi", "name": "Ann"},
    ]


def test_what_an_assistant_thought_is_for_the_template() -> None:
    for name in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "4", name: "2 and 2"}
        request = parse_request(ChatRequest, {"messages": [turn]}, SETTINGS)
        assert request.template_messages() == [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}]


def test_unknown_parameters_are_listed_and_bookkeeping_ones_are_not() -> None:
    request = parse_request(ChatRequest, {**CHAT, "zeta": 1, "alpha": 2, "user": "me", "mu": None}, SETTINGS)
    assert unknown_parameters(request) == ["alpha", "zeta"]
    options = {"stream_options": {"colour": 1, "include_obfuscation": False}}
    assert unknown_parameters(parse_request(ChatRequest, {**CHAT, **options}, SETTINGS)) == ["stream_options.colour"]


def test_deep_nesting_is_no_way_to_crash() -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(InvalidRequestError, match="nested more than 100 levels") as caught:
        parse_request(ChatRequest, {**CHAT, "x": value}, SETTINGS)
    assert caught.value.field == "x"
    value = 1
    for _ in range(90):
        value = {"a": [value]} if isinstance(value, int) else [value]
    parse_request(ChatRequest, {**CHAT, "x": value}, SETTINGS)
