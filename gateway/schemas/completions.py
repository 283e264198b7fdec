"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.schemas.controls import Integer, limits
from gateway.schemas.generation import GenerationRequest

_LOGPROBS = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"enum": [False, None]}]}
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]}


def _none_if_false(value: Any) -> Any:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], WithJsonSchema(_PROMPT)]
    """Prompts, each as text or as token ids."""
    logprobs: Annotated[
        Integer | None, Field(ge=0, le=20), BeforeValidator(_none_if_false), WithJsonSchema(_LOGPROBS)
    ] = None
    echo: bool | None = None
    best_of: Integer | None = None

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("choosing the best of several is not supported: leave it out, or send the value of n")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """See GenerationRequest."""
        return bool(self.echo)

    @field_validator("prompt", mode="before")
    @classmethod
    def _to_list(cls, value: Any, info: ValidationInfo) -> Any:
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not all(isinstance(p, str) or _is_token_ids(p) for p in prompts):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        limit = limits(info).max_prompts
        if not 1 <= len(prompts) <= limit:
            raise ValueError(f"holds {len(prompts)} prompts, 1 to {limit} are allowed")
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("a prompt must not be empty")
        return prompts


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int and item >= 0 for item in value)
