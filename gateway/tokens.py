"""What the gateway and the scheduler tell each other, in the gateway's own types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from service_kit.scores import TokenScore

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Sampling:
    """Sampling of a request; None takes the model's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias)"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer must not complete."""
    min_tokens: int = 0


@dataclass(frozen=True)
class StructuredOutput:
    """Form that an answer must have."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    """The schema as JSON, the regular expression, or the grammar in llguidance's dialect of Lark."""


@dataclass(frozen=True)
class TokenRequest:
    """A request in tokens."""

    request_id: str
    """Unique among live requests."""
    prompt_token_ids: list[int]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_choices: int = 1
    max_draft_tokens: int | None = None
    max_time_per_token_ms: float | None = None
    priority: float | None = None
    """Most drafts verified in a step; 0 makes none, None asks for nothing."""
    num_logprobs: int | None = None
    """Score the answer's tokens, with so many of the likeliest; None does not."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    isolation_key: bytes = b""
    """Stands for the caller: prompts are cached for each apart."""
    reports_steps: bool = False
    """Tell with every message what its step did."""
    structured_output: StructuredOutput | None = None


@dataclass(frozen=True)
class StepReport:
    """What a step did for one choice and beside it."""

    num_drafted: int
    num_verified: int
    num_accepted: int
    """Drafts that were committed."""
    num_uncut_accepted: int
    """Drafts that the verifier accepted, whether or not they were committed."""
    confidences: list[float]
    """Calibrated, of the drafts verified: how likely each is accepted once those before it are; NaN where none is."""
    budget: int
    """Drafts verified in the step, over all requests."""
    num_rows: int
    """Choices that got tokens from the step, over all requests."""


@dataclass(frozen=True)
class Tokens:
    """Tokens committed for one choice by one step."""

    choice: int
    token_ids: list[int]
    num_accepted: int
    """How many of them, from the first, are accepted drafts."""
    finish_reason: FinishReason | None
    scores: list[TokenScore] = field(default_factory=list)
    """One a token, if asked for."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the next prompt tokens, from the second on; they come with choice 0."""
    report: StepReport | None = None
    """Set where it was asked for and there are tokens."""


@dataclass(frozen=True)
class ChoiceStats:
    """Speculation statistics of one choice."""

    choice: int
    finish_reason: FinishReason | None
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    accepted_histogram: tuple[int, ...]
    num_drafted_steps: int = 0
    num_uncut_accepted: int = 0
    """Drafts that the verifier accepted: in verify mode `cap-accept`, also those that were not committed."""


@dataclass(frozen=True)
class Summary:
    """The end of a request."""

    choices: tuple[ChoiceStats, ...]
    num_prompt_tokens: int
    error: str = ""
    speculation_off_reason: str = ""
    num_cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache."""


@dataclass(frozen=True)
class Progress:
    """What tells a scheduler that works from one that hangs."""

    num_unfinished: int
    """Choices that run or wait."""
    num_tokens: int
    """Tokens committed and prompt tokens computed since its start."""


@dataclass(frozen=True)
class ModelInfo:
    """What the scheduler serves."""

    model: str
    drafter: str
    verify_mode: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    block_size: int
    sampling_defaults: Sampling = field(default_factory=Sampling)
    inexact_reason: str = ""
    """Why texts may change with the load; empty when they are exact to the bit."""
    structured_output_off_reason: str = ""
    """Why no request may have a structured output; empty when they may."""
