"""Request fields that change the target's logits, shared by chat and completion requests."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.settings import GatewaySettings


def _int_or_none(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)  # JSON has one kind of number: 16.0 is an integer; huge integers arrive as floats
    return value


def _false_if_none(value: Any) -> Any:
    return False if value is None else value


Integer = Annotated[int, BeforeValidator(_int_or_none)]
Flag = Annotated[
    bool, BeforeValidator(_false_if_none), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})
]


def limits(info: ValidationInfo) -> GatewaySettings:
    """The settings a request is validated with."""
    settings: GatewaySettings = info.context  # type: ignore[assignment]
    return settings


_BIASES = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        {"type": "null"},
    ]
}


class ControlFields(BaseModel):
    """Validate with the GatewaySettings as context."""

    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1 / 64, le=64)
    logit_bias: Annotated[dict[int, float] | None, WithJsonSchema(_BIASES)] = None
    """By token id."""
    bad_words: list[str] | None = None
    min_tokens: Integer | None = Field(None, ge=0, le=2**31)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_logit_bias(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return None
        limit = limits(info).max_logit_bias
        if not isinstance(value, dict):
            raise ValueError("must be an object of token ids and numbers")
        if len(value) > limit:
            raise ValueError(f"holds {len(value)} tokens, at most {limit} are allowed")
        biases: dict[int, float] = {}
        for token, bias in value.items():
            text = str(token)
            if not (text.isascii() and text.isdigit() and len(text) <= 10) or int(text) in biases:
                raise ValueError(f"{text[:40]!r} is not a token id, or is there twice")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {text} must be a number in [-100, 100]")
            biases[int(text)] = float(bias)
        return biases

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        allowed = limits(info)
        if value is not None and len(value) > allowed.max_bad_words:
            raise ValueError(f"holds {len(value)} words, at most {allowed.max_bad_words} are allowed")
        for word in value or ():
            if not 1 <= len(word) <= allowed.max_stop_length or not word.strip():
                raise ValueError(f"every word must have 1 to {allowed.max_stop_length} characters, not all white space")
        return value
