"""From a request as it arrives to one that can be served, or a refusal that says why."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kernels.philox import derive_key
from kernels.sampling import Regime, SlotSampling
from scheduler_service.controls import logit_controls
from scheduler_service.request import Event, GenerateSpec, Request, SamplingOptions, Sequence
from service_kit.errors import InvalidRequestError

_MAX_KEY = 2**64
MIN_PRIORITY, MAX_PRIORITY = 1 / 64, 64.0  # the same numbers in float32, as the wire has them


@dataclass(frozen=True)
class Limits:
    """Sizes of this scheduler."""

    max_num_seqs: int
    max_model_len: int
    """Prompt and answer together, in tokens."""
    max_batch_tokens: int
    num_pages: int
    page_size: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_size: int
    """Drafts per block; 0 when speculation is off."""
    feature_ring_rows: int
    """0 when speculation is off."""

    @property
    def max_chunk(self) -> int:
        """Most positions of one slot in one step."""
        return min(self.max_batch_tokens, self.feature_ring_rows or self.max_batch_tokens)


def accept_request(spec: GenerateSpec, limits: Limits, sink: Callable[[Event], None]) -> Request:
    """Validates a request and fixes its keys. Raises InvalidRequestError naming the field."""
    _check_prompt(spec, limits)
    _check_sampling(spec.sampling)
    _check_speculation(spec)
    if spec.max_tokens is not None and spec.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", field="max_tokens")
    if not 1 <= spec.num_choices <= limits.max_num_seqs:
        raise InvalidRequestError(
            f"n is {spec.num_choices}; this server runs at most {limits.max_num_seqs} choices at once "
            "(DSPARK_SCHEDULER_MAX_NUM_SEQS)",
            field="n",
        )
    shared = (len(spec.prompt) - 1) // limits.page_size
    needed = -(-len(spec.prompt) // limits.page_size)
    needed += (spec.num_choices - 1) * (needed - shared)
    if needed > limits.num_pages:
        raise InvalidRequestError(
            f"a prompt of {len(spec.prompt)} tokens with n = {spec.num_choices} needs {needed} pages of "
            f"{limits.page_size} positions, all the memory holds is {limits.num_pages}: lower n or raise "
            "DSPARK_SCHEDULER_KV_MEMORY",
            field="n",
        )
    if spec.grammar is not None and spec.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos cannot be had with structured_output: an answer ends where its form does", field="ignore_eos"
        )
    room = limits.max_model_len - len(spec.prompt)
    stop_token_ids = spec.stop_token_ids if spec.ignore_eos else spec.stop_token_ids | limits.eos_token_ids
    request = Request(
        request_id=spec.request_id,
        prompt=spec.prompt,
        max_tokens=room if spec.max_tokens is None else min(spec.max_tokens, room),
        stop_token_ids=stop_token_ids,
        sink=sink,
        max_draft_tokens=spec.max_draft_tokens,
        target_ns=None if spec.max_time_per_token_ms is None else 1e6 * spec.max_time_per_token_ms,
        priority=spec.priority,
        isolation_key=spec.isolation_key,
        reuses_prefix=not spec.bypass_prefix_cache and spec.num_prompt_logprobs is None,
        controls=logit_controls(spec, stop_token_ids, limits.vocab_size),
        num_logprobs=spec.num_logprobs,
        num_prompt_logprobs=spec.num_prompt_logprobs,
        reports_steps=spec.reports_steps,
        arrived_s=time.monotonic(),
    )
    for choice, sampling in enumerate(_slot_samplings(spec)):
        histogram = [0] * (limits.block_size + 1)
        sequence = Sequence(request, choice, sampling, list(spec.prompt), accepted_histogram=histogram)
        # Choice 0 computes the prompt's full pages; without a full page there is nothing to wait for.
        sequence.waits_for_prompt = choice > 0 and shared > 0
        if spec.grammar is not None:
            sequence.matcher = spec.grammar.matcher()
        request.choices.append(sequence)
    request.prompt_source = request.choices[0]
    return request


def _check_prompt(spec: GenerateSpec, limits: Limits) -> None:
    if not spec.request_id:
        raise InvalidRequestError("request_id is empty", field="request_id")
    if not spec.prompt:
        raise InvalidRequestError("the prompt has no tokens", field="prompt_token_ids")
    if len(spec.prompt) >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(spec.prompt)} tokens, the context holds {limits.max_model_len} with at least one "
            "for the answer",
            field="prompt_token_ids",
        )
    if not 0 <= min(spec.prompt) <= max(spec.prompt) < limits.vocab_size:
        raise InvalidRequestError(
            f"prompt token ids must be in 0 ... {limits.vocab_size - 1}", field="prompt_token_ids"
        )


def _check_sampling(sampling: SamplingOptions) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequestError("temperature must be a finite number >= 0", field="temperature")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError("top_p must be in (0, 1]", field="top_p")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequestError("min_p must be in [0, 1]", field="min_p")
    if not 0 <= sampling.top_k < 2**31:
        raise InvalidRequestError("top_k must be in 0 ... 2147483647 (0 keeps all)", field="top_k")
    if sampling.seed is not None and not 0 <= sampling.seed < _MAX_KEY:
        raise InvalidRequestError("seed must be in 0 ... 2**64 - 1", field="seed")


def _check_speculation(spec: GenerateSpec) -> None:
    target_ms = spec.max_time_per_token_ms
    if target_ms is not None and not (math.isfinite(target_ms) and target_ms > 0):
        raise InvalidRequestError(
            f"max_time_per_token_ms is {target_ms}: it must be a finite number of milliseconds > 0",
            field="speculation.max_time_per_token_ms",
        )
    if not MIN_PRIORITY <= spec.priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {spec.priority}: it must be in [1/64, 64]",
            field="speculation.priority",
        )


def _slot_samplings(spec: GenerateSpec) -> Iterator[SlotSampling]:
    """Sampling constants of each choice: every choice has its own random key."""
    asked = spec.sampling
    for choice in range(spec.num_choices):
        if asked.temperature == 0:
            yield SlotSampling(Regime.GREEDY, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p)
            continue
        if asked.seed is None:
            regime, key = Regime.REJECTION, secrets.randbits(64)
        else:
            regime, key = Regime.COUPLED, derive_key(asked.seed, choice)
        yield SlotSampling(regime, asked.temperature, asked.top_k, asked.top_p, asked.min_p, key)
