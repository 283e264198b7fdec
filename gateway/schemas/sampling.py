"""How the answer's tokens are chosen, where it stops, and what speculation may do: the same at every endpoint."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator

from gateway.schemas.controls import ControlFields, Integer, limits
from gateway.schemas.text_form import TextFields
from gateway.tokens import Sampling

_MAX_UINT64 = 2**64 - 1
_STOP_STRING = {"type": "string", "minLength": 1}
_STOP = {"anyOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING}, {"type": "null"}]}


class Speculation(BaseModel):
    """`speculation`: changes no text, only the time."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    enabled: bool | None = None
    """False: no drafts are made."""
    max_draft_tokens: Integer | None = Field(None, ge=0, le=2**31 - 1)
    """Most drafts verified in a step; 0 makes none."""
    max_time_per_token_ms: float | None = Field(None, gt=0)
    """Time per token that drafts must not push this request beyond."""
    priority: float | None = Field(None, ge=1 / 64, le=64)
    """What its tokens count for where drafts compete for verification; 1 if unset."""

    @property
    def limit(self) -> int | None:
        """Most drafts verified in a step; None asks for nothing."""
        return 0 if self.enabled is False else self.max_draft_tokens


class SamplingRequest(ControlFields, TextFields):
    """Validate with the GatewaySettings as context."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Integer | None = Field(None, ge=-(2**63), le=_MAX_UINT64)
    stop: Annotated[tuple[str, ...], WithJsonSchema(_STOP)] = ()
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    speculation: Speculation | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any, info: ValidationInfo) -> tuple[str, ...]:
        allowed = limits(info)
        stop = (value,) if isinstance(value, str) else () if value is None else value
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
            raise ValueError("must be a string, a list of strings or null")
        if len(stop) > allowed.max_stop_strings:
            raise ValueError(f"holds {len(stop)} strings, at most {allowed.max_stop_strings} are allowed")
        for text in stop:
            if not 1 <= len(text) <= allowed.max_stop_length:
                raise ValueError(f"every string must have 1 to {allowed.max_stop_length} characters")
        return tuple(stop)

    @field_validator("stop_token_ids")
    @classmethod
    def _check_stop_token_ids(cls, value: list[int] | None, info: ValidationInfo) -> list[int] | None:
        limit = limits(info).max_stop_token_ids
        if value is not None and len(value) > limit:
            raise ValueError(f"holds {len(value)} ids, at most {limit} are allowed")
        return value

    def sampling(self) -> Sampling:
        """The sampling fields as the scheduler takes them."""
        temperature = self.temperature
        if temperature is not None and temperature < 1e-5:
            temperature = 0.0  # logits divided by less overflow; the limit is greedy anyway
        return Sampling(
            temperature=temperature,
            top_k=None if self.top_k is None else max(0, self.top_k),  # -1 also means all
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed & _MAX_UINT64,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            min_tokens=self.min_tokens or 0,
        )
