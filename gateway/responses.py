"""OpenAI-shaped answers of chat and completion requests, whole and in chunks."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.detokenizer import Detokenizer, Piece
from gateway.generation import Delta, End, Generation
from gateway.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from gateway.schemas import ChatRequest, GenerationRequest
from gateway.statistics import speculation_statistics
from gateway.step_reports import step_body
from gateway.tokens import ModelInfo
from gateway.tools.chat import ChatCalls
from service_kit.scores import TokenScore

DONE = b"data: [DONE]\n\n"


def fingerprint(info: ModelInfo) -> str:
    """`system_fingerprint`: changes with the target, the drafter and the context length."""
    text = "\n".join((info.model, info.drafter, str(info.max_model_len)))
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def exactness(info: ModelInfo) -> dict[str, str]:
    """Header (or gRPC metadata) of every answer whose text may change with the load; none where texts are exact."""
    return {"x-dspark-exact": "false"} if info.inexact_reason else {}


def event(data: Any) -> bytes:
    """One server-sent event: a data line and nothing else (ids and named events break clients)."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


@dataclass
class _Choice:
    """A choice of a whole answer while it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """The answer to one request: all its prompts and their choices. Choice c of prompt p has index p * n + c."""

    def __init__(
        self,
        request: GenerationRequest,
        generations: Sequence[Generation],
        *,
        model: str,
        info: ModelInfo,
        is_chat: bool,
    ) -> None:
        """`model` is the name the client asked for."""
        self._request = request
        self._generations = generations
        self._is_chat = is_chat
        self._info = info
        self._num_choices = generations[0].request.num_choices
        self._num_prompt = sum(len(g.request.prompt_token_ids) for g in generations)
        self._num_cached = 0
        self._num_tokens = [0] * (len(generations) * self._num_choices)
        self._with_ids = bool(request.return_token_ids)
        tokenizer = generations[0].tokenizer
        self._token_bytes = tokenizer.named_bytes if request.shows_special_tokens else tokenizer.token_bytes
        self._writers: list[ChatLogprobs | CompletionLogprobs] = []
        """One a choice, where log-probabilities are asked for."""
        if request.num_logprobs is not None:
            self._writers = [
                ChatLogprobs(tokenizer) if is_chat else CompletionLogprobs(tokenizer, self._token_bytes)
                for _ in self._num_tokens
            ]
        self._calls: list[ChatCalls] = []
        """One a choice, where there are tools to call."""
        if isinstance(request, ChatRequest) and request.offered_tools:
            self._calls = [ChatCalls() for _ in self._num_tokens]
        self._prompt_scores: list[list[TokenScore]] = [[] for _ in generations]
        self._with_pieces = request.dspark is not None and request.dspark.pieces
        self._with_steps = request.dspark is not None and request.dspark.steps
        self._root = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{generations[0].request.request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint(info),
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [_Choice() for _ in self._num_tokens]
        end: End | None = None
        async with aclosing(self._events()) as events:
            async for prompt, item in events:
                if isinstance(item, End):
                    end = item
                    self._num_cached += item.num_cached_tokens
                    continue
                choice = choices[self._count(prompt, item)]
                choice.text += item.text
                choice.token_ids += item.token_ids
                choice.pieces += item.pieces
                choice.scores += item.scores
                choice.steps += [step_body(item.report)] if item.report is not None else []
                choice.finish_reason = item.finish_reason
        body: dict[str, Any] = {**self._root, "choices": [self._choice(i, c) for i, c in enumerate(choices)]}
        if self._with_ids and self._is_chat:
            body["prompt_token_ids"] = self._generations[0].request.prompt_token_ids
        if self._is_chat:
            body |= self._prompt_logprobs(0)
        return {**body, "usage": self._usage(), **self._statistics(end)}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, one a step, without the final DONE."""
        options = self._request.stream_options
        with_usage = bool(options and options.include_usage)
        is_continuous = bool(options and options.continuous_usage_stats)
        sends_empty = self._with_ids or is_continuous or bool(self._writers) or self._with_steps
        bare = {**self._root, "object": "chat.completion.chunk" if self._is_chat else "text_completion"}
        root = {**bare, "usage": None} if with_usage and not is_continuous else bare
        opened: set[int] = set()
        end: End | None = None
        async with aclosing(self._events()) as events:
            async for prompt, item in events:
                if isinstance(item, End):
                    end = item
                    self._num_cached += item.num_cached_tokens
                    continue
                index = self._count(prompt, item)
                deltas, reason = self._deltas(index, item)
                if not deltas and reason is None and not (sends_empty and item.token_ids):
                    continue
                usage = {"usage": self._usage()} if is_continuous else {}
                data = b""
                is_first = index not in opened
                if is_first:
                    opened.add(index)
                    data = self._opening(root, index, prompt, usage)
                for choice in self._choices(index, item, deltas or [{}], reason, is_first):
                    data += event({**root, "choices": [choice], **usage})
                yield data
        if with_usage:
            yield event({**bare, "choices": [], "usage": self._usage(), **self._statistics(end)})

    def cancel(self) -> None:
        """Aborts what still runs."""
        for generation in self._generations:
            generation.cancel()

    async def _events(self) -> AsyncGenerator[tuple[int, Delta | End], None]:
        """Events of all prompts. Where the prompt is echoed with its scores, they come first."""
        held: list[list[Delta]] = [[] for _ in self._generations]
        async with aclosing(_merge(self._generations)) as events:
            async for prompt, item in events:
                if isinstance(item, Delta):
                    self._prompt_scores[prompt] += item.prompt_scores
                    held[prompt].append(item)
                    num_scores = len(self._generations[prompt].request.prompt_token_ids) - 1
                    if self._request.echoes and self._writers and len(self._prompt_scores[prompt]) < num_scores:
                        continue
                for delta in held[prompt]:
                    yield prompt, delta
                held[prompt].clear()
                if isinstance(item, End):
                    yield prompt, item

    def _echo(self, prompt: int) -> str:
        """The prompt's text as its tokens say it, where it is echoed."""
        if not self._request.echoes:
            return ""
        generation = self._generations[prompt]
        step = Detokenizer(self._token_bytes).push(generation.request.prompt_token_ids, 0, is_last=True)
        return "".join(piece.text for piece in step.pieces)

    def _logprobs(
        self, index: int, token_ids: list[int], scores: Sequence[TokenScore], *, is_first: bool
    ) -> dict[str, Any] | None:
        """`logprobs` of the next tokens of a choice, behind those of an echoed prompt at its start."""
        if not self._writers:
            return None
        if not (is_first and self._request.echoes):
            return self._writers[index].add(token_ids, scores)
        prompt = index // self._num_choices
        prompt_ids, prompt_scores = self._generations[prompt].request.prompt_token_ids, self._prompt_scores[prompt]
        unknown = [None] * (len(prompt_ids) - 1 - len(prompt_scores))  # only where choice 0 was ended early
        return self._writers[index].add([*prompt_ids, *token_ids], [None, *prompt_scores, *unknown, *scores])

    def _prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        """`prompt_logprobs`, if asked for."""
        if self._request.prompt_logprobs is None:
            return {}
        generation = self._generations[prompt]
        prompt_ids = generation.request.prompt_token_ids
        return {"prompt_logprobs": prompt_logprobs(generation.tokenizer, prompt_ids, self._prompt_scores[prompt])}

    def _count(self, prompt: int, delta: Delta) -> int:
        index = prompt * self._num_choices + delta.choice
        self._num_tokens[index] = delta.num_tokens
        return index

    def _opening(self, root: dict[str, Any], index: int, prompt: int, usage: dict[str, Any]) -> bytes:
        """The first chunk of a choice: a chat's role; of a completion only if there are prompt ids to tell."""
        prompt_ids = self._generations[prompt].request.prompt_token_ids
        if self._is_chat:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": prompt_ids} if self._with_ids else {}
            return event({**root, "choices": [choice], **ids, **usage})
        if not self._with_ids:
            return b""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "prompt_token_ids": prompt_ids}
        return event({**root, "choices": [choice], **usage})

    def _deltas(self, index: int, item: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """What the item adds to a message, one chunk each, and the finish reason once there is one."""
        if self._calls:
            return self._calls[index].add(item.text, item.finish_reason)
        return [{"content": item.text}] if item.text else [], item.finish_reason

    def _choices(
        self, index: int, item: Delta, deltas: list[dict[str, Any]], reason: str | None, is_first: bool
    ) -> Iterator[dict[str, Any]]:
        """The choice of every chunk that the item makes. What belongs to its tokens comes with the first one."""
        logprobs = self._logprobs(index, item.token_ids, item.scores, is_first=is_first)
        step = {"step": step_body(item.report)} if item.report is not None else {}
        extras = self._extras(item.token_ids, item.pieces, step)
        for left, delta in zip(reversed(range(len(deltas))), deltas, strict=True):
            if self._is_chat:
                body: dict[str, Any] = {"delta": delta}
            else:
                body = {"text": (self._echo(index // self._num_choices) if is_first else "") + item.text}
            ending = {"logprobs": logprobs, "finish_reason": None if left else reason}
            yield {"index": index, **body, **ending, **extras}
            logprobs, extras = None, {}

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        reason = choice.finish_reason
        if self._calls:
            message, reason = self._calls[index].message(choice.text, reason)
            body: dict[str, Any] = {"message": message}
        elif self._is_chat:
            body = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        else:
            body = {"text": self._echo(index // self._num_choices) + choice.text}
            if self._with_ids:
                body["prompt_token_ids"] = self._generations[index // self._num_choices].request.prompt_token_ids
            body |= self._prompt_logprobs(index // self._num_choices)
        logprobs = self._logprobs(index, choice.token_ids, choice.scores, is_first=True)
        whole = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        steps = {"steps": choice.steps} if self._with_steps else {}
        return whole | self._extras(choice.token_ids, choice.pieces, steps)

    def _extras(self, token_ids: list[int], pieces: Sequence[Piece], steps: dict[str, Any]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._with_ids:
            extras["token_ids"] = token_ids
        if self._with_pieces:
            extras["dspark"] = {"pieces": [[piece.text, piece.is_accepted_draft] for piece in pieces], **steps}
        elif steps:
            extras["dspark"] = steps
        return extras

    def _usage(self) -> dict[str, Any]:
        num_tokens = sum(self._num_tokens)
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def _statistics(self, end: End | None) -> dict[str, Any]:
        """Speculation statistics, for a request with a single choice."""
        return speculation_statistics(end, self._info) if len(self._num_tokens) == 1 else {}


async def _merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta | End], None]:
    """Events of all generations as they come, with the prompt's number. Closing it closes them all."""
    if len(generations) == 1:
        async with aclosing(generations[0].events()) as events:
            async for item in events:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Delta | End] | Exception | None] = asyncio.Queue()

    async def pump(prompt: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.events()) as events:
                async for item in events:
                    queue.put_nowait((prompt, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(prompt, generation)) for prompt, generation in enumerate(generations)]
    try:
        num_running = len(tasks)
        while num_running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_running -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generation in generations:
            generation.cancel()
