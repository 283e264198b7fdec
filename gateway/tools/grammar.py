"""The grammar of answers that may, or must, call tools, in llguidance's dialect of Lark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.tokens import StructuredOutput
from gateway.tools.form import ARGUMENTS_OPEN, CALL_CLOSE, CALL_OPEN, CALL_SEPARATOR, NAME_OPEN, Tool

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is laid out unless a schema says otherwise (`x-guidance`): on one line. A model that may write white space
freely can do so without end."""


def json_text(schema: Mapping[str, Any]) -> str:
    """The schema as JSON, with JSON_STYLE unless it has its own. What cannot be enforced is an error, whatever it says
    about itself. Raises orjson.JSONEncodeError if nested too deeply."""
    own = schema.get("x-guidance", JSON_STYLE)
    return orjson.dumps({**schema, "x-guidance": {**own, "lenient": False} if isinstance(own, dict) else own}).decode()


def tool_grammar(
    tools: Sequence[Tool], *, is_required: bool, is_parallel: bool, content_schema: Mapping[str, Any] | None
) -> StructuredOutput:
    """Calls of `tools`, and nothing else if `is_required`; otherwise also free text, alone or before the calls.

    Text that holds the opening tag of a call must go on as one. With `content_schema` the free text is JSON of that
    schema and has no calls behind it. `is_parallel` allows several calls.
    """
    more = f"({_literal(CALL_SEPARATOR + CALL_OPEN)} call)*" if is_parallel else ""
    plain = f"{_literal(CALL_OPEN)} call {more}"
    rules: list[str] = []
    if is_required:
        rules.append(f"start: {plain}")
    elif content_schema is not None:
        rules += [f"start: content | {plain}", f"content: %json {json_text(content_schema)}"]
    else:
        rules += [
            f"start: TEXT | LEAD call {more}",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*{CALL_OPEN}.*)/",
            f"LEAD: TEXT {_literal(CALL_OPEN)}",
        ]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    rules.append(f"call: {_literal(NAME_OPEN)} ({names}) {_literal(CALL_CLOSE)}")
    for index, tool in enumerate(tools):
        rules.append(f"call_{index}: {_literal(tool.name + ARGUMENTS_OPEN)} arguments_{index}")
        rules.append(f"arguments_{index}: %json {json_text(tool.parameters)}")
    return StructuredOutput("lark", "\n".join(rules) + "\n")


def choice_grammar(choices: Sequence[str]) -> StructuredOutput:
    """One of the texts."""
    return StructuredOutput("lark", f"start: {' | '.join(map(_literal, choices))}\n")


def _literal(text: str) -> str:
    return orjson.dumps(text).decode()
