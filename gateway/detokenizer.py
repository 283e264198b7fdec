"""Tokens to text, one token at a time: incomplete characters and possible stop strings are held back."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Text of one token."""

    text: str
    is_accepted_draft: bool


class DetokenizedStep(NamedTuple):
    """What one step released."""

    pieces: tuple[Piece, ...]
    """Text that is final; may hold tokens of earlier steps."""
    num_tokens: int
    """Tokens of this step that belong to the answer: all, or those up to the end of a stop string."""
    is_stopped: bool
    """Whether a stop string was found; the text ends just before it, or with it where that is asked for."""


class Detokenizer:
    """Text of one choice. Its output does not depend on how the tokens are cut into steps."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        keeps_stop: bool = False,
    ) -> None:
        """`token_bytes` gives the bytes of a token; `stop` are the stop strings, none empty, which do not count where
        they are complete within the first `min_tokens` tokens. `keeps_stop`: what stopped the text is part of it."""
        self._token_bytes = token_bytes
        self._keeps_stop = keeps_stop
        self._num_blind_tokens = min_tokens
        self._num_blind_characters = 0
        """Of what is held back: a stop string that ends within them does not count."""
        self._stop = tuple(stop)
        self._max_held = max(map(len, self._stop), default=1) - 1
        # Python's incremental decoder waits for bytes that can still complete a character and replaces, at once, those
        # that cannot: exactly the rule wanted here.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: deque[Piece] = deque()
        self._held_text = ""

    def push(
        self, token_ids: Sequence[int], num_accepted: int, *, is_last: bool = False, ends_by_token: bool = False
    ) -> DetokenizedStep:
        """Takes the tokens of one step, of which the first `num_accepted` are accepted drafts.

        `is_last` releases what is held back. `ends_by_token`: the last token is there to stop, and adds no text. After
        a stop string the choice is over: push no more.
        """
        num_shown = len(token_ids) - (ends_by_token and not self._keeps_stop)
        for index, token_id in enumerate(token_ids):
            text = self._decoder.decode(self._token_bytes(token_id) if index < num_shown else b"")
            if self._add(text, index < num_accepted):
                return DetokenizedStep(self._release(0), index + 1, True)
        if is_last and (rest := self._decoder.decode(b"", final=True)) and self._add(rest, False):
            return DetokenizedStep(self._release(0), len(token_ids), True)
        return DetokenizedStep(self._release(0 if is_last else self._hold_len()), len(token_ids), False)

    def _add(self, text: str, is_accepted: bool) -> bool:
        """Appends a token's text; True when it completes a stop string, which is then cut off with all after it."""
        self._held.append(Piece(text, is_accepted))
        self._held_text += text
        if self._num_blind_tokens > 0:
            self._num_blind_tokens -= 1
            self._num_blind_characters = len(self._held_text)
            return False
        if not self._stop or not text:
            return False
        # Of several, the one complete first wins; of those the longest. Only this makes chunking irrelevant.
        found = [(at + len(s), at) for s in self._stop if (at := self._find(s)) >= 0]
        if not found:
            return False
        end, start = min(found)
        kept_len = end if self._keeps_stop else start
        surplus = len(self._held_text) - kept_len
        self._held_text = self._held_text[:kept_len]
        while surplus > 0:
            piece = self._held.pop()
            kept = piece.text[: max(0, len(piece.text) - surplus)]
            surplus -= len(piece.text)
            if kept:
                self._held.append(Piece(kept, piece.is_accepted_draft))
        return True

    def _find(self, stop: str) -> int:
        return self._held_text.find(stop, max(0, self._num_blind_characters - len(stop) + 1))

    def _hold_len(self) -> int:
        """Length of the longest end of the text that a stop string starts with."""
        text = self._held_text
        for length in range(min(self._max_held, len(text)), 0, -1):
            end = text[-length:]
            if any(s.startswith(end) for s in self._stop):
                return length
        return 0

    def _release(self, num_held: int) -> tuple[Piece, ...]:
        """Pieces of all but the last `num_held` characters."""
        count = len(self._held_text) - num_held
        released: list[Piece] = []
        while self._held and len(self._held[0].text) <= count:
            piece = self._held.popleft()
            count -= len(piece.text)
            released.append(piece)
        if count > 0:
            text, is_accepted = self._held[0]
            released.append(Piece(text[:count], is_accepted))
            self._held[0] = Piece(text[count:], is_accepted)
        self._num_blind_characters = max(0, self._num_blind_characters - len(self._held_text) + num_held)
        self._held_text = self._held_text[len(self._held_text) - num_held :] if num_held else ""
        return tuple(released)
