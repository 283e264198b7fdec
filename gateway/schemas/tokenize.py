"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from gateway.schemas.chat import ChatRequest


class TokenizeFields(BaseModel):
    """What both forms of /tokenize take."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    return_token_strs: bool | None = None
    """Send the text of every token too."""


class TokenizeTextRequest(TokenizeFields):
    """/tokenize of a raw prompt, as /v1/completions would read it."""

    prompt: str
    add_special_tokens: bool | None = None
    """False: without the model's own prefix, such as BOS."""


class TokenizeChatRequest(ChatRequest, TokenizeFields):
    """/tokenize of a chat: the same fields as /v1/chat/completions, and the same prompt."""

    add_special_tokens: bool | None = None

    @field_validator("add_special_tokens")
    @classmethod
    def _check_special_tokens(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("the chat template holds the special tokens: send false or leave it out")
        return value


class DetokenizeRequest(BaseModel):
    """/detokenize."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    tokens: list[int]

    @field_validator("tokens", mode="before")
    @classmethod
    def _check_tokens(cls, value: Any) -> Any:
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ValueError("must be a list of token ids")
        return value
