"""OpenTelemetry's names for generative AI, all of them in this file: the convention is in development and moves.

Pinned to semantic conventions 1.44.0. Prompts and answers, which the convention lets one record, are not.
"""

from __future__ import annotations

from typing import Literal

from opentelemetry import metrics
from opentelemetry.util.types import AttributeValue

from gateway.tokens import FinishReason, TokenRequest

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
_PROVIDER = "dspark"

Operation = Literal["chat", "text_completion"]

_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


def request_attributes(request: TokenRequest, operation: Operation, model: str) -> dict[str, AttributeValue]:
    """Of a span: what was asked for. Unset parameters have no attribute."""
    sampling = request.sampling
    optional: dict[str, AttributeValue | None] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.max_tokens": request.max_tokens,
        # An attribute's integers have 63 bits, a seed has 64.
        "gen_ai.request.seed": None if sampling.seed is None else str(sampling.seed),
        "gen_ai.request.choice.count": request.num_choices if request.num_choices > 1 else None,
    }
    return {**_names(operation, model), **{name: value for name, value in optional.items() if value is not None}}


def response_attributes(
    request_id: str, model: str, reasons: list[FinishReason], num_prompt: int, num_cached: int, num_tokens: int
) -> dict[str, AttributeValue]:
    """Of a span: what came of it."""
    return {
        "gen_ai.response.id": request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": num_cached,
    }


class ServerMetrics:
    """The convention's metrics of a server, to be exported over OTLP. Prometheus has its own (`metrics.py`)."""

    def __init__(self, provider: metrics.MeterProvider) -> None:
        """Histograms of `provider`; one that does nothing makes these do nothing."""
        meter = provider.get_meter("dspark", schema_url=SCHEMA_URL)

        def histogram(name: str, description: str, bounds: tuple[float, ...]) -> metrics.Histogram:
            return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=bounds)

        self._duration = histogram("gen_ai.server.request.duration", "Request duration", _DURATION_S)
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token", "Time per token after the first one", _PER_TOKEN_S
        )
        self._first_token = histogram("gen_ai.server.time_to_first_token", "Time to the first token", _FIRST_TOKEN_S)

    def record(
        self,
        operation: Operation,
        model: str,
        *,
        duration_s: float,
        first_token_s: float | None,
        per_token_s: float | None,
        error: str = "",
    ) -> None:
        """A generation has ended; times that do not exist are None. `error`: type of what ended it, if it failed."""
        attributes = {**_names(operation, model), "gen_ai.response.model": model}
        self._duration.record(duration_s, {**attributes, "error.type": error} if error else attributes)
        if first_token_s is not None and not error:
            self._first_token.record(first_token_s, attributes)
        if per_token_s is not None and not error:
            self._per_token.record(per_token_s, attributes)


def _names(operation: Operation, model: str) -> dict[str, AttributeValue]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
    }
