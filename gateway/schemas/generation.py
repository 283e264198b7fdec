"""What chat and completion requests share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gateway.schemas.controls import Flag, Integer
from gateway.schemas.sampling import SamplingRequest
from gateway.schemas.structured import StructuredFields


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = False
    """Send the usage in a last chunk without choices."""
    continuous_usage_stats: bool | None = False
    """Send the usage so far in every chunk."""


class Extension(BaseModel):
    """`dspark`: what no other API has."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    pieces: Flag = False
    """Send the text of every token with whether it was an accepted draft."""
    steps: Flag = False
    """Send what every step did."""


class GenerationRequest(SamplingRequest, StructuredFields):
    """What chat and completion requests share. Validate with the GatewaySettings as context."""

    max_tokens: Integer | None = Field(None, ge=1, le=2**53)
    max_completion_tokens: Integer | None = Field(None, ge=1, le=2**53)
    n: Integer | None = Field(None, ge=1, le=1024)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    dspark: Extension | None = None

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer, whichever name it came under."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each token of the answer; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False
