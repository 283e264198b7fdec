"""Whether a prompt fits, and what is left of it where the request lets it be cut."""

from __future__ import annotations

from typing import NamedTuple

from gateway.errors import ContextLengthError
from gateway.schemas import GenerationRequest
from gateway.tokens import ModelInfo
from service_kit.errors import InvalidRequestError


class FittedPrompt(NamedTuple):
    """A prompt that fits."""

    token_ids: list[int]
    max_tokens: int
    """Most tokens of the answer: those asked for, or the room left."""


def fit_prompt(token_ids: list[int], request: GenerationRequest, info: ModelInfo, field: str) -> FittedPrompt:
    """Cuts the prompt where `truncate_prompt_tokens` says so, and bounds the answer by the room left.

    `field` is the prompt's name in the request. Raises InvalidRequestError for an empty prompt or ids outside the
    vocabulary, ContextLengthError for a prompt that does not fit.
    """
    keep = request.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, info.max_model_len - (request.token_limit or 1))
    if keep is not None:
        token_ids = token_ids[-keep:]
    num_prompt = len(token_ids)
    if num_prompt == 0:
        raise InvalidRequestError(f"{field}: the prompt has no tokens", field=field)
    room = info.max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, you requested "
            f"{num_prompt + 1} tokens ({num_prompt} in the {field}, at least 1 in the completion). "
            f"Please reduce the length of the {field}.",
            field=field,
        )
    largest = max(token_ids)
    if largest >= info.vocab_size:
        raise InvalidRequestError(
            f"{field}: token id {largest} is outside the vocabulary of {info.vocab_size}", field=field
        )
    return FittedPrompt(token_ids, min(room, request.token_limit or room))
