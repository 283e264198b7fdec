"""Prompts to token ids. Special tokens that a user types into a chat message stay plain text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.chat_template import ChatTemplate
from gateway.tokenizer import TextTokenizer
from service_kit.errors import InvalidRequestError


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

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """Ids of the rendered chat. Raises InvalidRequestError without a template, or when it refuses the messages."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or set DSPARK_GATEWAY_CHAT_TEMPLATE",
                field="messages",
            )
        if self._allow_special_tokens or not self._has_special([messages, variables]):
            return self._tokenizer.encode_rendered(self._template.render(messages, variables))
        guard = _Guard(self._tokenizer)
        rendered = self._template.render(guard.mask(messages), guard.mask(variables))
        return guard.encode(rendered)

    def _has_special(self, value: Any) -> bool:
        if isinstance(value, str):
            search = self._tokenizer.special_pattern.search
            return bool(search(value) or search(self._tokenizer.normalize(value)))
        if isinstance(value, Mapping):
            return any(map(self._has_special, value.values()))
        return isinstance(value, Sequence) and any(map(self._has_special, value))


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
            return {key: self.mask(item) for key, item in value.items()}
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
