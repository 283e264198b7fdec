"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.chat_template import RESERVED_VARIABLES
from gateway.schemas.controls import Integer, limits
from gateway.schemas.generation import GenerationRequest
from gateway.schemas.text_form import TemplateEnd
from gateway.schemas.tools import ToolFields, TurnToolCall

_MAX_TEMPLATE_VARIABLES = 32
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}


class ChatMessage(BaseModel):
    """One turn. Text only."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, WithJsonSchema(_CONTENT)] = ""
    name: str | None = None
    tool_calls: list[TurnToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What an assistant thought, for templates that show it; `reasoning` is another name for it."""
    reasoning: str | None = None
    function_call: None = None
    audio: None = None

    @field_validator("function_call", "audio", mode="before")
    @classmethod
    def _check_absent(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("is not supported: leave it out (calls belong into tool_calls)")

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string, a list of text parts or null")
        texts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError('parts must be {"type": "text", "text": "..."}: this model reads text only')
            texts.append(part["text"])
        return "".join(texts)

    def for_template(self) -> dict[str, Any]:
        """The turn as a template sees it."""
        turn = self.model_dump(include={"role", "content", "name", "tool_call_id"}, exclude_none=True)
        if (thought := self.reasoning_content or self.reasoning) is not None:
            turn["reasoning_content"] = thought
        included = {"id", "type", "function"}
        calls = [call.model_dump(include=included, exclude_none=True) for call in self.tool_calls or ()]
        return {**turn, "tool_calls": calls} if calls else turn


class ChatRequest(GenerationRequest, ToolFields, TemplateEnd):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("messages")
    @classmethod
    def _check_count(cls, value: list[ChatMessage], info: ValidationInfo) -> list[ChatMessage]:
        limit = limits(info).max_messages
        if len(value) > limit:
            raise ValueError(f"holds {len(value)} messages, at most {limit} are allowed")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in RESERVED_VARIABLES or name.endswith("_token") or not name.isidentifier():
                raise ValueError(f"{name!r} cannot be set by a request")
        if value is not None and len(value) > _MAX_TEMPLATE_VARIABLES:
            raise ValueError(f"at most {_MAX_TEMPLATE_VARIABLES} variables are allowed")
        return value

    def template_messages(self) -> list[dict[str, Any]]:
        """The turns as a template sees them."""
        return [message.for_template() for message in self.messages]

    def template_variables(self) -> dict[str, Any]:
        """Variables for the template besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}
