"""Log-probabilities in OpenAI's two shapes: that of chats and that of completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from gateway.tokenizer import TextTokenizer
from service_kit.scores import TokenScore

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def prompt_logprobs(
    tokenizer: TextTokenizer, token_ids: Sequence[int], scores: Sequence[TokenScore]
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: an object for each token of the prompt, by token id; null for those without a score: the
    first, and where choice 0 was ended early others."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        name = tokenizer.named_bytes(token_id).decode(errors="replace")
        return {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": name}

    entries: list[dict[str, Any] | None] = [None]
    for token_id, score in zip(token_ids[1:], scores, strict=False):
        top = zip(score.top_ids, score.top_logprobs, range(1, len(score.top_ids) + 1), strict=True)
        likeliest = {str(each): entry(each, logprob, rank) for each, logprob, rank in top}
        entries.append({str(token_id): entry(token_id, score.logprob, score.rank)} | likeliest)
    return entries + [None] * (len(token_ids) - len(entries))


class ChatLogprobs:
    """`logprobs` of one choice of a chat."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def add(self, token_ids: Sequence[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        """The object for these tokens."""
        content = []
        for token_id, score in zip(token_ids, scores, strict=True):
            assert score is not None  # a chat has no echo
            top = [self._entry(*each) for each in zip(score.top_ids, score.top_logprobs, strict=True)]
            content.append(self._entry(token_id, score.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.named_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}


class CompletionLogprobs:
    """`logprobs` of one choice of a completion. Counts characters for `text_offset`, so add tokens in order."""

    def __init__(self, tokenizer: TextTokenizer, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` gives what a token adds to the text."""
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, token_ids: Sequence[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        """The object for these tokens; None scores one of which nothing is known: the first of an echoed prompt."""
        part: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, score in zip(token_ids, scores, strict=True):
            part["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._token_bytes(token_id)))
            part["tokens"].append(self._name(token_id))
            part["token_logprobs"].append(None if score is None else max(score.logprob, _LEAST))
            part["top_logprobs"].append(None if score is None else self._top(token_id, score))
        return part

    def _top(self, token_id: int, score: TokenScore) -> dict[str, float]:
        """The likeliest tokens, and the chosen one if it is not among them."""
        top = dict(zip(score.top_ids, score.top_logprobs, strict=True)) | {token_id: score.logprob}
        return {self._name(each): max(logprob, _LEAST) for each, logprob in top.items()}

    def _name(self, token_id: int) -> str:
        """Text of a token; tokens that are no whole characters by their bytes, so that names differ."""
        data = self._tokenizer.named_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
