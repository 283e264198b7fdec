"""Tools in chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.schemas.controls import limits
from gateway.schemas.structured import RequestedForm, StructuredFields, check_schema, check_size
from gateway.tools.form import MAX_NAME_LEN, Tool
from gateway.tools.grammar import tool_grammar

_NAME = rf"^[A-Za-z0-9_-]{{1,{MAX_NAME_LEN}}}$"
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionDefinition(BaseModel):
    """`tools[].function`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @field_validator("parameters")
    @classmethod
    def _check(cls, value: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if value is None:
            return None
        schema = {"type": "object", **value}
        if schema["type"] != "object":
            raise ValueError('must be a JSON schema with "type": "object"')
        return check_schema(schema, info)


class ToolDefinition(BaseModel):
    """`tools[]`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["function"]
    function: FunctionDefinition

    def to_tool(self) -> Tool:
        """The tool, one without parameters taking none."""
        function = self.function
        parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
        return Tool(function.name, function.description, parameters)


@dataclass(frozen=True)
class ToolChoice:
    """`tool_choice`."""

    must_call: bool
    """Whether the answer must be a call."""
    is_forbidden: bool = False
    name: str | None = None
    """The only tool that may be called; None for any."""


class ToolFields(StructuredFields):
    """Validate with the GatewaySettings as context."""

    tools: list[ToolDefinition] | None = None
    tool_choice: Annotated[ToolChoice | None, WithJsonSchema(_TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: list[ToolDefinition] | None, info: ValidationInfo) -> list[ToolDefinition] | None:
        limit = limits(info).max_tools
        names = [definition.function.name for definition in value or ()]
        if len(names) > limit:
            raise ValueError(f"holds {len(names)} tools, at most {limit} are allowed")
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"{repeated!r} is there twice")
        structured = info.data.get("structured_outputs")
        if value and structured is not None and structured.output() is not None:
            raise ValueError("cannot be combined with structured_outputs: use response_format, or leave out the tools")
        tools = [definition.to_tool() for definition in value or ()]
        grammar = tool_grammar(tools, is_required=False, is_parallel=True, content_schema=None, added_tokens={})
        check_size(grammar.text, info)
        return value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _read_tool_choice(cls, value: Any, info: ValidationInfo) -> ToolChoice | None:
        if value in (None, "auto", "none"):
            return ToolChoice(must_call=False, is_forbidden=value == "none")
        names = [definition.function.name for definition in info.data.get("tools") or ()]
        if not names:
            raise ValueError("needs tools")
        if value == "required":
            return ToolChoice(must_call=True)
        function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}')
        if name not in names:
            raise ValueError(f"{name[:MAX_NAME_LEN]!r} is not one of the tools: {', '.join(names)}"[:1000])
        return ToolChoice(must_call=True, name=name)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """Tools that the model may call."""
        choice = self.tool_choice or ToolChoice(must_call=False)
        if choice.is_forbidden:
            return ()
        tools = (definition.to_tool() for definition in self.tools or ())
        return tuple(tool for tool in tools if choice.name in (None, tool.name))

    def requested_form(self, added_tokens: Mapping[str, int]) -> RequestedForm | None:
        """See StructuredFields: calls are part of the form."""
        if not (tools := self.offered_tools):
            return super().requested_form(added_tokens)
        choice = self.tool_choice or ToolChoice(must_call=False)
        grammar = tool_grammar(
            tools,
            is_required=choice.must_call,
            is_parallel=self.parallel_tool_calls is not False and choice.name is None,
            content_schema=self.response_format.schema_of_text if self.response_format is not None else None,
            added_tokens=added_tokens,
        )
        return RequestedForm("tools", grammar)


class FunctionCall(BaseModel):
    """`tool_calls[].function` of a turn."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: str = Field(pattern=_NAME)
    arguments: str = ""


class TurnToolCall(BaseModel):
    """`tool_calls[]` of a turn."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
