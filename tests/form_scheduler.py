"""A scripted scheduler that keeps to the form a request asks for, so that real clients find what they asked for."""

from __future__ import annotations

from typing import Any

import llguidance
from gateway_harness import EOS_ID, VOCAB_SIZE, ScriptedScheduler, encode, tiny_tokenizer
from llguidance import LLMatcher

from gateway.tokenizer import TextTokenizer

_PREFERRED = [EOS_ID, *encode('}]",:0123456789')]
"""Tokens that bring JSON to its end, the first one that is allowed first."""


class _Tokens:
    """The tiny tokenizer as llguidance wants it."""

    eos_token_id, bos_token_id = EOS_ID, None
    special_token_ids = (256, EOS_ID)

    def __init__(self) -> None:
        tokenizer = TextTokenizer(tiny_tokenizer())
        self.tokens = [tokenizer.named_bytes(token_id) or b"<unused>" for token_id in range(VOCAB_SIZE)]

    def __call__(self, text: bytes | str) -> list[int]:
        return encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


class FormScheduler(ScriptedScheduler):
    """Gives its scripted answers where the form allows them, otherwise the shortest text that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens()))

    def _tokens(self, request: Any, choice: int) -> list[int]:
        tokens = super()._tokens(request, choice)
        if not request.HasField("structured_output"):
            return tokens
        kind = request.structured_output.WhichOneof("form")
        text = getattr(request.structured_output, kind)
        matcher = LLMatcher(self._tokenizer, getattr(LLMatcher, f"grammar_from_{kind}")(text))
        assert not matcher.is_error(), matcher.get_error()
        if matcher.validate_tokens(tokens) == len(tokens):
            return tokens
        tokens = []
        while not matcher.is_stopped() and len(tokens) < request.max_tokens:
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            token = next(i for i in (*_PREFERRED, *range(VOCAB_SIZE)) if mask >> i & 1)
            tokens.append(token)
            matcher.consume_token(token)
        return tokens if tokens[-1:] == [EOS_ID] else [*tokens, EOS_ID]
