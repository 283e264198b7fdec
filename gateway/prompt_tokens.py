"""Text of requests to tokens and back, in threads of its own: the event loop never waits for a long prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.prompts import PromptEncoder
from gateway.schemas import ChatRequest, TokenizeChatRequest, TokenizeTextRequest
from gateway.tokenizer import TextTokenizer

_NUM_THREADS = 2
ResultT = TypeVar("ResultT")


class PromptTokens:
    """Tokens of chats, prompts and words."""

    def __init__(self, tokenizer: TextTokenizer, encoder: PromptEncoder) -> None:
        """`encoder` must use `tokenizer`."""
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    async def of_chat(self, request: ChatRequest) -> list[int]:
        """Ids of the rendered chat. Raises InvalidRequestError when the template refuses the messages."""

        def encode() -> list[int]:
            messages, variables = request.template_messages(), request.template_variables()
            return self._encoder.encode_chat(messages, variables, request.offered_tools, request.chat_end)

        return await self._in_thread(encode)

    async def of_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Ids of raw prompts; those that are ids already stay what they are."""

        def encode() -> list[list[int]]:
            return [self._encoder.encode_text(each) if isinstance(each, str) else each for each in prompts]

        return await self._in_thread(encode)

    async def of_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokens of every word, at the start of a text and behind a space: most tokenizers tell them apart."""

        def encode() -> tuple[tuple[int, ...], ...]:
            texts = [text for word in words for text in (word, f" {word.lstrip()}")]
            return tuple(dict.fromkeys(tuple(self._tokenizer.encode_plain(text)) for text in texts))

        return await self._in_thread(encode)

    async def of_tokenize(self, request: TokenizeChatRequest | TokenizeTextRequest) -> list[int]:
        """Ids of the prompt that a request for an answer would have. Raises InvalidRequestError."""
        if isinstance(request, TokenizeChatRequest):
            return await self.of_chat(request)
        text, has_prefix = request.prompt, request.add_special_tokens is not False
        encode = self._encoder.encode_text if has_prefix else self._tokenizer.encode_rendered
        return await self._in_thread(lambda: encode(text))

    async def texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones by name; U+FFFD for what is no whole character by itself."""
        return await self._in_thread(
            lambda: [self._tokenizer.named_bytes(token_id).decode(errors="replace") for token_id in token_ids]
        )

    async def text(self, token_ids: Sequence[int]) -> str:
        """Their text, special tokens by name."""
        return await self._in_thread(
            lambda: b"".join(map(self._tokenizer.named_bytes, token_ids)).decode(errors="replace")
        )

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False)
