"""Request fields that give the answer a form: `response_format`, `structured_outputs` and the older `guided_*`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gateway.schemas.controls import limits
from gateway.tokens import StructuredOutput
from gateway.tools.grammar import choice_grammar, json_text
from service_kit.errors import InvalidRequestError

_MAX_CHOICES = 1024
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class RequestedForm(NamedTuple):
    """The form an answer must have."""

    field: str
    """The request's field that asks for it."""
    output: StructuredOutput


def check_size(text: str, info: ValidationInfo) -> str:
    """The schema, regular expression or grammar. Raises ValueError for one over the limit."""
    size, limit = len(text.encode()), limits(info).max_form_bytes
    if size > limit:
        raise ValueError(f"has {size} bytes, at most {limit} are allowed")
    return text


def check_schema(schema: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """The JSON schema. Raises ValueError for one that is too large or too deep."""
    try:
        check_size(json_text(schema), info)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise ValueError(f"is nested too deeply, or holds a number that is too large ({error})") from error
    return schema


def _schema_of(value: Any) -> Any:
    """A schema that may come as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        schema = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError("must hold a JSON object")
    return schema


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: str | None = Field(None, max_length=64)
    json_schema: dict[str, Any] = Field(alias="schema")

    @field_validator("json_schema")
    @classmethod
    def _check(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return check_schema(value, info)


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _check(cls, value: JsonSchemaFormat | None, info: ValidationInfo) -> JsonSchemaFormat | None:
        is_wanted = info.data.get("type") == "json_schema"
        if value is None and is_wanted:
            raise ValueError("is required with type json_schema")
        if value is not None and not is_wanted:
            raise ValueError("goes with type json_schema only")
        return value

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """Schema that the answer's JSON must have; None for free text."""
        if self.json_schema is not None:
            return self.json_schema.json_schema
        return _ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """`structured_outputs`: exactly one of its fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1)
    choice: list[str] | None = Field(None, min_length=1, max_length=_MAX_CHOICES)
    grammar: str | None = Field(None, min_length=1)

    @field_validator("json_schema", mode="before")
    @classmethod
    def _read_schema(cls, value: Any) -> Any:
        return _schema_of(value)

    @field_validator("json_schema", "json_object", "regex", "choice", "grammar")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        if not value and not isinstance(value, dict):
            return None
        others = [name for name, other in info.data.items() if other is not None]
        if others:
            raise ValueError(f"cannot be combined with {others[0].replace('json_schema', 'json')}: give one of them")
        if isinstance(value, dict):
            return check_schema(value, info)
        if isinstance(value, list) and not all(value):
            raise ValueError("a choice must not be empty")
        if isinstance(value, (str, list)):
            check_size("".join(value), info)
        return value

    def output(self) -> StructuredOutput | None:
        """The form; None if no field is set."""
        if self.json_object:
            return json_form(_ANY_OBJECT)
        if self.json_schema is not None:
            return json_form(self.json_schema)
        if self.choice is not None:
            return choice_grammar(self.choice)
        if self.regex is not None:
            return StructuredOutput("regex", self.regex)
        return StructuredOutput("lark", self.grammar) if self.grammar is not None else None


def json_form(schema: dict[str, Any]) -> StructuredOutput:
    """JSON of a schema."""
    return StructuredOutput("json_schema", json_text(schema))


class StructuredFields(BaseModel):
    """Validate with the GatewaySettings as context."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("structured_outputs")
    @classmethod
    def _check_one_form(cls, value: StructuredOutputs | None, info: ValidationInfo) -> StructuredOutputs | None:
        response_format = info.data.get("response_format")
        if value is not None and value.output() and response_format and response_format.schema_of_text is not None:
            raise ValueError("cannot be combined with response_format: give one of them")
        return value

    def requested_form(self, added_tokens: Mapping[str, int]) -> RequestedForm | None:
        """The form of the answer; None for free text. `added_tokens`: see `tool_grammar`."""
        if self.response_format is not None and (schema := self.response_format.schema_of_text) is not None:
            return RequestedForm("response_format", json_form(schema))
        output = self.structured_outputs.output() if self.structured_outputs is not None else None
        return RequestedForm("structured_outputs", output) if output is not None else None


@contextmanager
def blamed_on(form: RequestedForm | None) -> Iterator[None]:
    """Raises the scheduler's InvalidRequestError about the form as one about the request's own field."""
    try:
        yield
    except InvalidRequestError as error:
        if form is None:
            raise
        message = re.sub(r"\bstructured_output\b", form.field, error.message)
        field = form.field if error.field == "structured_output" else error.field
        raise InvalidRequestError(message, field=field) from error
