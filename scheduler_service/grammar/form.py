"""What a request says about the form of its answer, and the grammar that llguidance makes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llguidance import LLMatcher

from service_kit.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

FIELD = "structured_output"
_WHITESPACE: JsonCompileOptions = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
"""White space between the parts of JSON is bounded, unless a schema has its own rule (`x-guidance`): a model that likes
it would else fill its answer with it."""
_WHITESPACE_RULES = ("whitespace_flexible", "whitespace_pattern")
_STRICT: JsonCompileOptions = {"lenient": False}
"""Keywords that are not implemented are refused, whatever the schema says about itself."""


@dataclass(frozen=True)
class StructuredOutput:
    """Form of every choice's whole text."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    def to_grammar(self, max_bytes: int) -> str:
        """llguidance's input. Raises InvalidRequestError for what is no schema or longer than `max_bytes`."""
        size = len(self.text.encode())
        if size > max_bytes:
            raise refusal(
                f"{self.kind} has {size} bytes, more than the {max_bytes} of DSPARK_SCHEDULER_MAX_GRAMMAR_BYTES"
            )
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.text)
        try:
            schema = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise refusal(f"json_schema is not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise refusal("json_schema must be an object")
        own = schema.get("x-guidance")
        has_own_rule = isinstance(own, dict) and not own.keys().isdisjoint(_WHITESPACE_RULES)
        defaults = None if has_own_rule else _WHITESPACE
        try:
            return LLMatcher.grammar_from_json_schema(self.text, defaults=defaults, overrides=_STRICT)
        except ValueError as error:  # nested too deeply
            raise refusal(f"json_schema: {error}") from error


def refusal(message: str) -> InvalidRequestError:
    """The error of a form that cannot be had."""
    return InvalidRequestError(f"{FIELD}: {message}", field=FIELD)
