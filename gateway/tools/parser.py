"""Text of an answer to tool calls, as it comes."""

from __future__ import annotations

import re
import secrets
from enum import Enum
from typing import NamedTuple, TypeAlias

from gateway.tools.form import ARGUMENTS_OPEN, CALL_CLOSE, CALL_OPEN, CALL_SEPARATOR, MAX_NAME_LEN, NAME_OPEN

_NAME = re.compile(f"[A-Za-z0-9_-]{{0,{MAX_NAME_LEN}}}")
_OUTSIDE_STRING = re.compile(r'[{}"]')
_INSIDE_STRING = re.compile(r'["\\]')


class TextPart(NamedTuple):
    """Text outside calls."""

    text: str


class CallStart(NamedTuple):
    """A call begins."""

    call: int
    """Number of the call, from 0."""
    call_id: str
    name: str


class ArgumentsPart(NamedTuple):
    """More of a call's arguments, which are JSON."""

    call: int
    text: str


Part: TypeAlias = TextPart | CallStart | ArgumentsPart


class _At(Enum):
    TEXT = 0
    """Outside calls."""
    HEAD = 1
    """At an opening tag."""
    ARGUMENTS = 2
    TAIL = 3
    """Behind the arguments."""
    AFTER = 4
    """Behind a call, where another one may follow."""


class ToolCallParser:
    """Reads the answer of one choice. Where the text is cut changes nothing but where the parts are cut. Text that only
    begins like a call is text."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._at = _At.TEXT
        self._held = ""
        """Not told yet: what follows decides what it is."""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the arguments of the last one are complete."""
        return self.num_calls > 0 and self._at is not _At.ARGUMENTS

    def push(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Takes more of the answer; `is_last` tells what is held back as what it is without more."""
        parts: list[Part] = []
        self._held += text
        while self._held and self._advance(parts, is_last):
            pass
        return parts

    def _advance(self, parts: list[Part], is_last: bool) -> bool:
        """Takes something off what is held; False when that needs more text."""
        if self._at is _At.TEXT:
            return self._read_text(parts, is_last)
        if self._at is _At.ARGUMENTS:
            return self._read_arguments(parts)
        if self._at is _At.TAIL:
            return self._read_tail()
        return self._read_head(parts, is_last)

    def _read_text(self, parts: list[Part], is_last: bool) -> bool:
        end = self._held.find(CALL_OPEN)
        if end >= 0:
            self._at = _At.HEAD
        else:
            end = len(self._held) - (0 if is_last else _num_opening(self._held))
        self._tell(parts, end)
        return self._at is _At.HEAD

    def _read_head(self, parts: list[Part], is_last: bool) -> bool:
        before = CALL_OPEN if self._at is _At.HEAD else CALL_SEPARATOR + CALL_OPEN
        start, rest = before + NAME_OPEN, self._held[len(before + NAME_OPEN) :]
        name_match = _NAME.match(rest)
        assert name_match is not None  # it matches nothing, too
        name, rest = name_match[0], rest[name_match.end() :]
        end = ARGUMENTS_OPEN + "{"
        if name and self._held.startswith(start) and rest.startswith(end):
            self._at = _At.ARGUMENTS
            self._held = rest[len(ARGUMENTS_OPEN) :]
            parts.append(CallStart(self.num_calls, f"call_{secrets.token_hex(12)}", name))
            self.num_calls += 1
            return True
        is_open = start.startswith(self._held[: len(start)]) and (end.startswith(rest) if name else not rest)
        if is_open and not is_last:
            return False
        if self._at is _At.HEAD:
            self._tell(parts, len(CALL_OPEN))
        self._at = _At.TEXT
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        position = 0
        while position < len(self._held) and self._at is _At.ARGUMENTS:
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            match = (_INSIDE_STRING if self._is_in_string else _OUTSIDE_STRING).search(self._held, position)
            position = match.end() if match else len(self._held)
            character = match[0] if match else ""
            if character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = not self._is_in_string
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if self._depth == 0:
                    self._at = _At.TAIL
        parts.append(ArgumentsPart(self.num_calls - 1, self._held[:position]))
        self._held = self._held[position:]
        return True

    def _read_tail(self) -> bool:
        if self._held.startswith(CALL_CLOSE):
            self._held = self._held[len(CALL_CLOSE) :]
            self._at = _At.AFTER
            return True
        if CALL_CLOSE.startswith(
            self._held
        ):  # at the end of an answer, what is left of a cut closing tag tells nothing
            return False
        self._at = _At.TEXT
        return True

    def _tell(self, parts: list[Part], end: int) -> None:
        """Tells the text up to `end`."""
        if end > 0:
            parts.append(TextPart(self._held[:end]))
            self._held = self._held[end:]


def _num_opening(text: str) -> int:
    """Length of the longest end of the text that an opening tag starts with."""
    for length in range(min(len(CALL_OPEN) - 1, len(text)), 0, -1):
        if CALL_OPEN.startswith(text[-length:]):
            return length
    return 0
