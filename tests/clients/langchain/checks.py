"""LangChain's ChatOpenAI against a real server: calls, streams, tools, structured output."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from server_options import Server

QUESTION = "Name three colours of the rainbow."


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


@tool
def weather(city: Literal["Berlin", "Paris"]) -> str:
    """Tells the weather of a city."""
    return f"{city}: sunny"


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        model=server.model, base_url=f"{server.url}/v1", api_key=server.api_key, temperature=0, max_tokens=200,
        max_retries=0,
    )  # fmt: skip


def test_invoke_and_stream_say_the_same(chat: ChatOpenAI) -> None:
    short = chat.bind(max_tokens=32)
    turns = [SystemMessage("Be brief."), HumanMessage([{"type": "text", "text": QUESTION}])]
    whole = short.invoke(turns)
    pieces = list(short.stream(turns, stream_usage=True))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert whole.content
    usage = next(piece.usage_metadata for piece in reversed(pieces) if piece.usage_metadata)
    assert usage["output_tokens"] == whole.usage_metadata["output_tokens"] <= 32
    assert usage["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert whole.response_metadata["finish_reason"] in ("stop", "length")


def test_batches_and_asynchronous_calls(chat: ChatOpenAI) -> None:
    short = chat.bind(max_tokens=8)
    first, second = short.batch([QUESTION, "Say hello."])
    assert asyncio.run(short.ainvoke(QUESTION)).content == first.content
    assert second.content


def test_a_tool_is_called_and_its_result_goes_back(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    turns: list[Any] = [HumanMessage("How is the weather in Paris?")]
    answer = bound.invoke(turns)
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    last = chat.bind_tools([weather], tool_choice="none").invoke([*turns, answer, result])
    assert last.content
    assert not last.tool_calls


def test_tool_calls_are_streamed(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False)
    pieces = list(bound.stream("How is the weather in Paris?"))
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    (call,) = total.tool_calls
    assert call["args"]["city"] in ("Berlin", "Paris")
    assert call["id"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    structured = chat.with_structured_output(City, method=method)
    assert isinstance(structured.invoke("Describe Paris."), City)


def test_json_mode(chat: ChatOpenAI) -> None:
    structured = chat.with_structured_output(None, method="json_mode", include_raw=True)
    raw = structured.invoke("Describe Paris as JSON.")["raw"]
    assert isinstance(raw, AIMessage)
    assert str(raw.content).startswith("{")


def test_scores(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2, max_tokens=4).invoke(QUESTION)
    scores = answer.response_metadata["logprobs"]["content"]
    assert "".join(score["token"] for score in scores) == answer.content


def test_the_responses_api(server: Server) -> None:
    chat = ChatOpenAI(
        model=server.model, base_url=f"{server.url}/v1", api_key=server.api_key, temperature=0, max_tokens=16,
        use_responses_api=True,
    )  # fmt: skip
    whole = chat.invoke(QUESTION)
    assert whole.text
    assert "".join(piece.text for piece in chat.stream(QUESTION)) == whole.text


def test_errors(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        chat.bind(temperature=9).invoke("Hi")
