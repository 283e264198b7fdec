"""The grammar of answers that may, or must, call tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.tokens import StructuredOutput
from gateway.tools.form import (
    ARGUMENTS_CLOSE,
    ARGUMENTS_OPEN,
    CALL_END,
    CALL_OPEN,
    CALL_SEPARATOR,
    CALL_TAGS,
    NAME_OPEN,
    Tool,
)

_BRACKETED = re.compile(r"<.*>\Z", re.DOTALL)

MAX_CALLS = 32
"""Calls of an answer: small models do not stop by themselves."""
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is laid out unless a schema says otherwise (`x-guidance`): on one line. A model that may write white space
freely can do so without end."""


def json_text(schema: Mapping[str, Any]) -> str:
    """The schema as JSON, with JSON_STYLE unless it has its own. What cannot be enforced is an error, whatever it says
    about itself. Raises orjson.JSONEncodeError if nested too deeply."""
    own = schema.get("x-guidance", JSON_STYLE)
    return orjson.dumps({**schema, "x-guidance": {**own, "lenient": False} if isinstance(own, dict) else own}).decode()


def tool_grammar(
    tools: Sequence[Tool],
    *,
    is_required: bool,
    is_parallel: bool,
    content_schema: Mapping[str, Any] | None,
    added_tokens: Mapping[str, int],
) -> StructuredOutput:
    """Calls of `tools`, and nothing else if `is_required`; otherwise also free text, alone or before the calls.

    Text that holds the opening tag of a call must go on as one. With `content_schema` the free text is JSON of that
    schema and has no calls behind it. `is_parallel` allows up to MAX_CALLS calls.

    `added_tokens`: ids of the tokenizer's added tokens that answers show, by text. llguidance takes those in angle
    brackets for no text: they stand in grammars as tokens. So tags that are tokens must be written with these, and of
    the others free text may hold any.
    """
    opening = CALL_OPEN if CALL_OPEN in added_tokens else _literal(CALL_OPEN)
    end = CALL_END if CALL_END in added_tokens else _literal(CALL_END)
    more = f"({_literal(CALL_SEPARATOR)} {opening} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
    rules: list[str] = []
    if is_required:
        rules.append(f"start: {opening} call {more}")
    elif content_schema is not None:
        rules += [f"start: content | {opening} call {more}", f"content: %json {json_text(content_schema)}"]
    else:
        others = [id for text, id in added_tokens.items() if _BRACKETED.match(text) and text not in CALL_TAGS]
        before = f"(TEXT <[{_ranges(others)}]>)* " if others else ""
        lead = f"TEXT {opening}"
        if CALL_OPEN not in added_tokens:
            rules.append(f"LEAD: {lead}")  # one lexeme: a lexer that reads text does not see where a tag in it began
            lead = "LEAD"
        rules += [f"start: {before}TEXT | {before}{lead} call {more}", f"TEXT: /(?s:.*)/ & ~/(?s:.*{CALL_OPEN}.*)/"]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules.append(f"call: {_literal(NAME_OPEN)} ({names}) {_literal(ARGUMENTS_CLOSE)} {end}")
    for index, tool in enumerate(tools):
        rules.append(f"call_{index}: {_literal(tool.name + ARGUMENTS_OPEN)} arguments_{index}")
        rules.append(f"arguments_{index}: %json {json_text(tool.parameters)}")
    return StructuredOutput("lark", "\n".join(rules) + "\n")


def choice_grammar(choices: Sequence[str]) -> StructuredOutput:
    """One of the texts."""
    return StructuredOutput("lark", f"start: {' | '.join(map(_literal, choices))}\n")


def _ranges(ids: list[int]) -> str:
    """The ids as `1-3,7`."""
    ranges: list[list[int]] = []
    for each in sorted(ids):
        if ranges and each == ranges[-1][1] + 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def _literal(text: str) -> str:
    return orjson.dumps(text).decode()
