"""Answers of /v1/responses, whole and as its named events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson

from gateway.errors import to_http
from gateway.generation import End, Generation
from gateway.logprobs import ChatLogprobs
from gateway.response_output import Event, Output
from gateway.schemas import ResponsesRequest
from gateway.statistics import speculation_statistics
from gateway.tokens import ModelInfo


class ResponsesAnswer:
    """The answer to one request."""

    def __init__(self, request: ResponsesRequest, generation: Generation, *, model: str, info: ModelInfo) -> None:
        """`model` is the name the client asked for."""
        self._request = request
        self._generation = generation
        self._info = info
        self._model = model
        self._created = int(time.time())
        self._id = generation.request.request_id
        self._output = Output(self._id, has_tools=bool(request.tools) and request.tool_choice != "none")
        self._scores = ChatLogprobs(generation.tokenizer) if request.includes_logprobs else None
        self._reason: str | None = None
        self._num_tokens = 0
        self._end: End | None = None
        self._num_events = 0

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        async with aclosing(self._steps()) as steps:
            async for _ in steps:
                pass
        return self._body()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        yield self._event("response.created", response=self._body())
        yield self._event("response.in_progress", response=self._body())
        async with aclosing(self._steps()) as steps:
            async for kind, fields in steps:
                yield self._event(kind, **fields)
        yield self._event(f"response.{self._status}", response=self._body())

    def failure(self, error: Exception) -> bytes:
        """The event for an error after the first one: `error` names it for this API, and for clients of the others."""
        body = to_http(error).body["error"]
        told = {"code": body["code"], "message": body["message"], "param": body["param"]}
        return self._event("error", **told, error=body)

    def cancel(self) -> None:
        """Aborts what still runs."""
        self._generation.cancel()

    async def _steps(self) -> AsyncGenerator[Event, None]:
        """Events about the output items."""
        for event in self._output.opening():
            yield event
        async with aclosing(self._generation.events()) as events:
            async for item in events:
                if isinstance(item, End):
                    self._end = item
                    continue
                logprobs = self._scores.add(item.token_ids, item.scores)["content"] if self._scores else []
                self._num_tokens, self._reason = item.num_tokens, item.finish_reason
                for event in self._output.add(item.text, logprobs, is_last=item.finish_reason is not None):
                    yield event
        for event in self._output.closing(self._status):
            yield event

    @property
    def _status(self) -> str:
        if self._reason is None:
            return "in_progress"
        return "incomplete" if self._reason == "length" else "completed"

    def _body(self) -> dict[str, Any]:
        """The response object as it is now."""
        request, is_done = self._request, self._reason is not None
        sampling = self._generation.request.sampling
        reasoning = {"effort": request.reasoning.effort if request.reasoning is not None else None, "summary": None}
        form = request.text.format if request.text is not None and request.text.format is not None else {"type": "text"}
        body: dict[str, Any] = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._model,
            "output": self._output.bodies(self._status) if is_done else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": reasoning,
            "store": False,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "text": {"format": form},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_done else None,
            "metadata": request.metadata or {},
        }
        return body | speculation_statistics(self._end, self._info)

    def _usage(self) -> dict[str, Any]:
        num_prompt = len(self._generation.request.prompt_token_ids)
        num_cached = self._end.num_cached_tokens if self._end is not None else 0
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + self._num_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\n".encode() + b"data: " + orjson.dumps(data) + b"\n\n"
