"""Controls and scores that a request asks of the target: checked here, applied by the verifier."""

from __future__ import annotations

import math

from kernels.sampling import LogitControls
from scheduler_service.request import GenerateSpec, SamplingOptions
from service_kit.errors import InvalidRequestError

MAX_LOGPROBS = 20
_MAX_PENALTY, _MAX_BIAS = 2.0, 100.0
_MIN_REPETITION, _MAX_REPETITION = 1 / 64, 64.0
"""Far beyond what is of use, and safe in single precision."""


def logit_controls(spec: GenerateSpec, stop_token_ids: frozenset[int], vocab_size: int) -> LogitControls:
    """Controls of a request that ends at `stop_token_ids`. Raises InvalidRequestError naming the field."""
    asked = spec.sampling
    _check_ranges(asked)
    _check_ids("logit_bias", [token_id for token_id, _ in asked.logit_bias], vocab_size)
    if any(not abs(bias) <= _MAX_BIAS for _, bias in asked.logit_bias):
        raise InvalidRequestError(f"logit_bias values must be in [-{_MAX_BIAS:g}, {_MAX_BIAS:g}]", field="logit_bias")
    if len(dict(asked.logit_bias)) < len(asked.logit_bias):
        raise InvalidRequestError("logit_bias names a token twice", field="logit_bias")
    _check_ids("bad_words", [token_id for word in asked.bad_words for token_id in word], vocab_size)
    if not all(asked.bad_words):
        raise InvalidRequestError("bad_words holds a sequence without tokens", field="bad_words")
    _check_ids("stop_token_ids", list(spec.stop_token_ids), vocab_size)
    if asked.min_tokens < 0:
        raise InvalidRequestError("min_tokens must be at least 0", field="min_tokens")
    if spec.max_tokens is not None and asked.min_tokens > spec.max_tokens:
        raise InvalidRequestError(
            f"min_tokens {asked.min_tokens} is more than max_tokens {spec.max_tokens}", field="min_tokens"
        )
    for name in ("num_logprobs", "num_prompt_logprobs"):
        count = getattr(spec, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidRequestError(f"{name} must be in 0 ... {MAX_LOGPROBS}", field=name)
    return LogitControls(
        asked.repetition_penalty,
        asked.frequency_penalty,
        asked.presence_penalty,
        asked.logit_bias,
        asked.bad_words,
        asked.min_tokens,
        tuple(sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)) if asked.min_tokens else (),
    )


def _check_ranges(asked: SamplingOptions) -> None:
    for name in ("frequency_penalty", "presence_penalty"):
        if not abs(getattr(asked, name)) <= _MAX_PENALTY:  # NaN is refused as well
            raise InvalidRequestError(f"{name} must be in [-{_MAX_PENALTY:g}, {_MAX_PENALTY:g}]", field=name)
    penalty = asked.repetition_penalty
    if not (math.isfinite(penalty) and _MIN_REPETITION <= penalty <= _MAX_REPETITION):
        raise InvalidRequestError(
            f"repetition_penalty must be in [{_MIN_REPETITION:g}, {_MAX_REPETITION:g}]; 1 changes nothing",
            field="repetition_penalty",
        )


def _check_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{field}: {token_id} is outside the vocabulary of {vocab_size}", field=field)
