"""A small HTTP client of the gateway: streams one answer and keeps what chat, doctor and bench need of it."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

Message = dict[str, str]


class ServerError(Exception):
    """The server refused the request, failed in the middle of it, or cannot be reached."""


class Piece(NamedTuple):
    """Text of one token and whether the token was an accepted draft."""

    text: str
    is_accepted_draft: bool


@dataclass
class Answer:
    """One streamed answer, filled while it arrives. Times are `perf_counter` seconds."""

    started: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Filled when the request asks for `return_token_ids`."""
    finish_reason: str | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    speculation: dict[str, Any] | None = None
    """`metrics.speculative_decoding` of the last chunk."""

    @property
    def ttft_ms(self) -> float:
        """Time to the first text, in milliseconds."""
        return ((self.first_token or time.perf_counter()) - self.started) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per token after the first, in milliseconds; None below two tokens."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) * 1000 / (self.num_tokens - 1)

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens a step committed; None without speculation."""
        value = (self.speculation or {}).get("mean_acceptance_length")
        return None if value is None else float(value)


class Client:
    """Talks to one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` without `/v1`."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def is_ready(self) -> bool:
        """Whether `/health` says ready."""
        try:
            return self._http.get("/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def model(self) -> str:
        """Name of the served model. Raises ServerError."""
        try:
            reply = self._http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            raise ServerError(f"no server at {self._http.base_url}: start one with `dspark serve`") from error
        if reply.status_code != 200:
            raise ServerError(_error_text(reply.status_code, reply.text))
        return str(reply.json()["data"][0]["id"])

    def chat(self, messages: Sequence[Message], answer: Answer, **parameters: Any) -> Generator[Piece, None, None]:
        """Streams the answer to `messages` into `answer`, yielding its text. Raises ServerError.

        Without the `dspark.pieces` parameter, the text of a step comes as one piece that is not marked.
        """
        body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **parameters}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise ServerError(_error_text(reply.status_code, reply.read().decode(errors="replace")))
                for line in reply.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield from _take(json.loads(data), answer)
        except httpx.HTTPError as error:
            raise ServerError(f"connection to {self._http.base_url} lost: {error or type(error).__name__}") from error


def new_answer() -> Answer:
    """An empty answer whose clock starts now."""
    return Answer(started=time.perf_counter())


def _take(chunk: dict[str, Any], answer: Answer) -> Iterator[Piece]:
    if "error" in chunk:
        raise ServerError(str(chunk["error"].get("message", chunk["error"])))
    now = time.perf_counter()
    for choice in chunk.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        token_ids = choice.get("token_ids") or []
        answer.token_ids += token_ids
        text = choice.get("delta", {}).get("content") or ""
        answer.text += text
        if text or token_ids:
            answer.first_token = answer.first_token or now
            answer.last_token = now
        pieces = (choice.get("dspark") or {}).get("pieces")
        if pieces:
            yield from (Piece(str(piece), bool(is_accepted)) for piece, is_accepted in pieces)
        elif text:
            yield Piece(text, False)
    if usage := chunk.get("usage"):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_tokens = usage["completion_tokens"]
    if metrics := chunk.get("metrics"):
        answer.speculation = metrics.get("speculative_decoding")


def _error_text(status: int, body: str) -> str:
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200]}"
