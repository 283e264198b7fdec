"""Prompts to token ids. Special tokens that a user types into a chat message stay plain text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from gateway.chat_template import ChatTemplate
from gateway.tokenizer import TextTokenizer
from gateway.tools.form import Tool
from gateway.tools.prompt import as_plain_turns, as_tool_turns
from service_kit.errors import InvalidRequestError


class ChatEnd(Enum):
    """Where the rendered chat ends."""

    ANSWER = "answer"
    """Where the assistant's answer starts."""
    TURN = "turn"
    """Behind the last turn."""
    CONTINUE = "continue"
    """Within the last turn, the assistant's, behind its text."""


class PromptEncoder:
    """Renders and tokenises. Blocking: call it from a worker thread."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None, *, allow_special_tokens: bool) -> None:
        """`template` is None for a model that cannot chat."""
        self._tokenizer = tokenizer
        self._template = template
        self._allow_special_tokens = allow_special_tokens

    def encode_text(self, prompt: str) -> list[int]:
        """Ids of a raw prompt; special tokens in it count, since such a client writes its own template."""
        return self._tokenizer.encode(prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[Tool] = (),
        end: ChatEnd = ChatEnd.ANSWER,
    ) -> list[int]:
        """Ids of the rendered chat. Raises InvalidRequestError without a template, or when it refuses the messages."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or set DSPARK_GATEWAY_CHAT_TEMPLATE",
                field="messages",
            )
        mark = f"\ue002{secrets.token_hex(8)}"  # where the last turn's text ends, in the rendered chat
        if end is ChatEnd.CONTINUE:
            messages = _with_mark(messages, mark)
        shown: list[dict[str, Any]] = []
        if self._template.has_tools:
            messages, shown = as_tool_turns(messages), [tool.described() for tool in tools]
        else:
            messages = as_plain_turns(messages, tools, has_system_role=not tools or self._template.has_system_role)
        if self._allow_special_tokens or not self._has_special([messages, variables, shown]):
            return self._tokenizer.encode_rendered(self._render(messages, variables, shown, end, mark))
        guard = _Guard(self._tokenizer)
        return guard.encode(self._render(guard.mask(messages), guard.mask(variables), guard.mask(shown), end, mark))

    def _render(self, messages: Any, variables: Any, tools: Any, end: ChatEnd, mark: str) -> str:
        assert self._template is not None
        rendered = self._template.render(messages, variables, tools, add_generation_prompt=end is ChatEnd.ANSWER)
        if end is not ChatEnd.CONTINUE:
            return rendered
        if mark not in rendered:
            raise InvalidRequestError(
                "continue_final_message: the chat template does not show the last message as it is",
                field="continue_final_message",
            )
        return rendered[: rendered.rindex(mark)]

    def _has_special(self, value: Any) -> bool:
        if isinstance(value, str):
            search = self._tokenizer.special_pattern.search
            return bool(search(value) or search(self._tokenizer.normalize(value)))
        if isinstance(value, Mapping):
            return any(map(self._has_special, (*value, *value.values())))
        return isinstance(value, Sequence) and any(map(self._has_special, value))


def _with_mark(messages: Sequence[Mapping[str, Any]], mark: str) -> list[Mapping[str, Any]]:
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise InvalidRequestError(
            "continue_final_message needs the last message to be the assistant's, without tool calls",
            field="continue_final_message",
        )
    return [*messages[:-1], {**last, "content": last["content"] + mark}]


class _Guard:
    """Stands an unguessable mark in for every special token of a user's text while the template is rendered, so that
    those left in the rendered prompt are the template's own."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = list(tokenizer.special_tokens)
        self._find = re.compile("|".join(map(re.escape, sorted(self._names, key=len, reverse=True))))
        self._nonce = secrets.token_hex(8)
        self._mark = re.compile(f"\ue000{self._nonce}([0-9]+)\ue001")

    def mask(self, value: Any) -> Any:
        """`value` with the marks in its strings, at any depth."""
        if isinstance(value, str):
            return self._find.sub(lambda m: f"\ue000{self._nonce}{self._names.index(m[0])}\ue001", value)
        if isinstance(value, Mapping):
            return {self.mask(key): self.mask(item) for key, item in value.items()}
        return [self.mask(item) for item in value] if isinstance(value, Sequence) else value

    def encode(self, rendered: str) -> list[int]:
        """Ids: the template's special tokens by id, everything between them as plain text."""
        token_ids: list[int] = []
        end = 0
        for match in self._tokenizer.special_pattern.finditer(rendered):
            token_ids += self._encode_plain(rendered[end : match.start()])
            token_ids.append(self._tokenizer.special_tokens[match[match.lastgroup or 0]])
            end = match.end()
        return token_ids + self._encode_plain(rendered[end:])

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain(self._mark.sub(lambda m: self._names[int(m[1])], text))
