"""POST /v1/responses: a chat under other names. Nothing is stored, so what needs stored responses is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.schemas.chat import ChatRequest
from gateway.schemas.controls import Integer, limits
from gateway.schemas.parsing import parse_request
from gateway.schemas.response_items import (
    INPUT_SCHEMA,
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    chat_tool_choice,
    chat_tools,
    turns_of,
)
from gateway.schemas.sampling import SamplingRequest
from gateway.settings import GatewaySettings
from service_kit.errors import InvalidRequestError

_LOGPROBS = "message.output_text.logprobs"
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""Fields of the chat that have another name here; the longest counts."""


class TextConfig(BaseModel):
    """`text`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    format: dict[str, Any] | None = None
    """{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": ..., "schema": ...}."""

    def response_format(self) -> dict[str, Any] | None:
        """The same as a chat says it."""
        form = self.format
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


class Reasoning(BaseModel):
    """`reasoning`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    effort: str | None = Field(None, max_length=32)
    """A variable for the model's chat template."""


class ResponsesRequest(SamplingRequest):
    """Validate with the GatewaySettings as context."""

    input: Annotated[list[dict[str, Any]], WithJsonSchema(INPUT_SCHEMA)]
    """Turns as a chat has them; a string is one turn of the user."""
    instructions: str | None = None
    max_output_tokens: Integer | None = Field(None, ge=1, le=2**53)
    stream: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: Annotated[str | dict[str, Any] | None, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None

    @field_validator("previous_response_id", "conversation", "prompt", mode="before")
    @classmethod
    def _check_stateless(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("this server stores nothing to refer to: send all turns in input")

    @field_validator("prompt_logprobs")
    @classmethod
    def _check_prompt_logprobs(cls, value: int | None) -> None:
        if value is not None:
            raise ValueError("is not supported here: use /v1/chat/completions")

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and _LOGPROBS not in (info.data.get("include") or ()):
            raise ValueError(f"needs include to hold {_LOGPROBS!r}")
        return value

    @field_validator("input", mode="before")
    @classmethod
    def _to_turns(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            raise ValueError("must be a string or a list of items, at least one")
        limit = limits(info).max_messages
        if len(value) > limit:
            raise ValueError(f"holds {len(value)} items, at most {limit} are allowed")
        return turns_of(value)

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: list[dict[str, Any]] | None, info: ValidationInfo) -> list[dict[str, Any]] | None:
        if value and _LOGPROBS in (info.data.get("include") or ()):
            raise ValueError(f"has no {_LOGPROBS!r} beside it here: use /v1/chat/completions")
        chat_tools(value or [])
        return value

    @field_validator("tool_choice")
    @classmethod
    def _check_tool_choice(cls, value: Any) -> Any:
        chat_tool_choice(value)
        return value

    @field_validator("include")
    @classmethod
    def _check_include(cls, value: list[str] | None) -> list[str] | None:
        # Of reasoning that there is none of, nothing can be left out.
        for name in value or ():
            if name not in (_LOGPROBS, "reasoning.encrypted_content"):
                raise ValueError(f"{name[:60]!r} is not supported: {_LOGPROBS} is")
        return value

    @property
    def includes_logprobs(self) -> bool:
        """Whether the answer's tokens are scored."""
        return _LOGPROBS in (self.include or ())

    def to_chat(self, settings: GatewaySettings) -> ChatRequest:
        """The chat that answers this. Raises InvalidRequestError naming the field of this request."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body = self.model_dump(include=set(SamplingRequest.model_fields), exclude_none=True) | {
            "messages": system + self.input,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.includes_logprobs,
            "top_logprobs": self.top_logprobs if self.includes_logprobs else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": None if self.tools is None else chat_tools(self.tools),
            "tool_choice": chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.response_format() if self.text is not None else None,
        }
        try:
            return parse_request(ChatRequest, body, settings)
        except InvalidRequestError as error:
            raise renamed(error) from error


def renamed(error: InvalidRequestError) -> InvalidRequestError:
    """An error about the chat, as one about the request that it was made of."""
    for head, name in _NAMES.items():
        if error.field == head or error.field.startswith((f"{head}.", f"{head}[")):
            error.field = name + error.field[len(head) :]
            error.message = error.message.replace(head, name)
            break
    if error.field.startswith("tools["):
        error.field, error.message = (text.replace("].function", "]") for text in (error.field, error.message))
    return error
