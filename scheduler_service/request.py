"""A request and its choices, in tokens."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from kernels.sampling import LogitControls, SlotSampling, TargetOptions
from kernels.token_scores import TokenScore
from scheduler_service.audit import audit_key

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from scheduler_service.grammar.matcher import AnswerMatcher, Grammar


class FinishReason(enum.IntEnum):
    """Why a choice ended; the numbers are those of the wire."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling as the client asked; neutral where it did not."""

    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias)"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer must not complete."""
    min_tokens: int = 0


@dataclass(frozen=True)
class GenerateSpec:
    """A request as it arrives, not yet validated."""

    request_id: str
    prompt: list[int]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int | None = None
    """None: the room left."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_choices: int = 1
    isolation_key: bytes = b""
    """Prefixes are reused among requests with the same key only, unless the operator shares across keys."""
    bypass_prefix_cache: bool = False
    """Compute every prompt position."""
    max_draft_tokens: int | None = None
    """Most drafts verified in a step; 0 makes none, None asks for nothing."""
    max_time_per_token_ms: float | None = None
    """Time per token that drafts must not push the request beyond; None: the server's target, if it has one."""
    priority: float = 1.0
    """What a token counts for where drafts compete for verification."""
    num_logprobs: int | None = None
    """Score the answer's tokens, with so many of the likeliest; None does not."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on. Every prompt position is then computed."""
    grammar: Grammar | None = None
    """Form of every choice's text; None leaves it free."""
    reports_steps: bool = False
    """Tell with every chunk what its step did."""


@dataclass(frozen=True)
class ChoiceSummary:
    """Speculation statistics of one choice."""

    choice: int
    finish_reason: FinishReason
    num_tokens: int
    num_steps: int
    """Steps after the first token."""
    num_drafted: int
    num_verified: int
    num_accepted: int
    accepted_histogram: tuple[int, ...]
    """Entry k counts the steps that accepted exactly k drafts; block_size + 1 entries."""
    num_drafted_steps: int = 0
    num_uncut_accepted: int = 0
    """Drafts that the verifier accepted: in `cap-accept`, also those beyond the window that is committed."""


class StepReport(NamedTuple):
    """What a step did for one choice and beside it."""

    num_drafted: int
    confidences: list[float]
    """Calibrated, of the drafts verified: how likely each is accepted once those before it are; NaN where none is."""
    num_uncut_accepted: int
    """Drafts that the verifier accepted, whether or not they were committed."""
    budget: int
    """Drafts verified in the step, over all rows."""
    num_rows: int
    """Rows of the step that emit."""


class TokenChunk(NamedTuple):
    """Tokens committed for one choice by one step."""

    choice: int
    token_ids: Seq[int]
    num_accepted: int
    """How many of them, from the first, are accepted drafts."""
    num_verified: int
    finish_reason: FinishReason | None
    """Set on the choice's last chunk."""
    scores: Seq[TokenScore] = ()
    """One a token, if asked for."""
    prompt_scores: Seq[TokenScore] = ()
    """Of the next prompt tokens, from the second on."""
    report: StepReport | None = None
    """Set where the request asks for it and the chunk has tokens."""


OffKind = Literal["server", "request", "context", "gate", "short"]


class OffReason(NamedTuple):
    """Why nothing was drafted for a request."""

    kind: OffKind
    words: str


@dataclass(frozen=True)
class Summary:
    """The end of a request."""

    choices: tuple[ChoiceSummary, ...]
    num_prompt_tokens: int
    error: str
    speculation_off_reason: str
    """Why nothing was drafted; empty when drafts were made."""
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V came from the prefix cache."""


Event: TypeAlias = "TokenChunk | Summary"


class _WeaklyReferable:
    """Base of a dataclass with slots that weak references are made to: Python 3.10 has no other way to say that."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Sequence(_WeaklyReferable):
    """One choice of a request: its tokens and where the executors stand with them.

    With slots, as all that the step thread reads row by row: at this many fields attributes of a dictionary take three
    times as long.
    """

    request: Request
    choice: int
    sampling: SlotSampling
    tokens: list[int]
    """Prompt, then committed tokens. The last one is the anchor once the prompt is computed."""
    slot: int = -1
    """Index on the executors; -1 while not running."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """Positions whose target K/V is computed, from 0."""
    ingested: int = 0
    """Positions whose features the drafter has ingested, from 0."""
    page_names: list[bytes] = field(default_factory=list)
    """Names of the leading full pages by content, as far as somebody asked (see `prefix_cache`)."""
    num_published: int = 0
    """Leading pages offered to the prefix cache."""
    num_shared_pages: int = 0
    """Leading pages computed (and ingested) by another choice of the request."""
    waits_for_prompt: bool = False
    """Whether another choice is computing the full pages of the prompt for this one."""
    uningested_since: int = 0
    """Id of the step that computed position `ingested`: rows stamped by older steps are stale."""
    round: int = 0
    """Draft calls issued for this choice; never goes back."""
    is_plain_once: bool = False
    """Whether the next step must not draft: the last one failed for this row."""
    num_failures: int = 0
    """Steps that failed in a row."""
    context_lost: str = ""
    """Why the draft context cannot be used any more, in words; then the choice decodes plainly."""
    matcher: AnswerMatcher | None = None
    """Where the answer stands in the form that it must have; None leaves it free."""
    finish_reason: FinishReason | None = None
    admitted_ns: int = 0
    """When it first got a slot, on the monotonic clock; 0 before."""
    first_token_ns: int = 0
    """When it was committed, on the same clock; 0 before."""
    num_steps: int = 0
    num_drafted_steps: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_uncut_accepted: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    max_len: int = field(init=False)
    """Tokens, prompt included, with which it ends at the latest."""
    audit_key: int = field(init=False)
    """What its audits follow from."""

    def __post_init__(self) -> None:
        self.max_len = len(self.request.prompt) + self.request.max_tokens
        self.audit_key = audit_key(self.request.request_id, self.choice)

    @property
    def is_running(self) -> bool:
        """Whether the choice holds a slot."""
        return self.slot >= 0

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_len - len(self.tokens)

    @property
    def is_decoding(self) -> bool:
        """Whether everything but the anchor is computed."""
        return self.computed == len(self.tokens) - 1

    def target_options(self) -> TargetOptions | None:
        """What is asked of the target for this choice, with the text as it stands; None if nothing is."""
        request = self.request
        prompt_scores = request.num_prompt_logprobs if self.choice == 0 else None
        if request.controls.is_neutral and request.num_logprobs is None and prompt_scores is None:
            return None
        return TargetOptions(
            request.controls, tuple(self.tokens), len(request.prompt), request.num_logprobs, prompt_scores
        )

    def summary(self) -> ChoiceSummary:
        """The statistics so far."""
        return ChoiceSummary(
            self.choice,
            self.finish_reason or FinishReason.ERROR,
            self.num_tokens,
            self.num_steps,
            self.num_drafted,
            self.num_verified,
            self.num_accepted,
            tuple(self.accepted_histogram),
            self.num_drafted_steps,
            self.num_uncut_accepted,
        )


@dataclass(eq=False, slots=True)
class Request:
    """A validated request: one prompt, one or more choices."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """Already clamped to the room left."""
    stop_token_ids: frozenset[int]
    """End-of-sequence ids included unless they are ignored."""
    sink: Callable[[Event], None]
    """Takes the events, in order."""
    choices: list[Sequence] = field(default_factory=list)
    prompt_source: Sequence | None = None
    """The choice that computes the prompt's full pages for those that wait."""
    error: str = ""
    span: Span | None = None
    """Trace span, when this request is traced."""
    is_queued: bool = True
    """Whether it still counts against the bounded queue: not admitted yet."""
    max_draft_tokens: int | None = None
    """None: no limit of its own."""
    target_ns: float | None = None
    """Most time per token; None: no target."""
    priority: float = 1.0
    isolation_key: bytes = b""
    reuses_prefix: bool = True
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None before it was asked."""
    controls: LogitControls = field(default_factory=LogitControls)
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    reports_steps: bool = False
    num_prompt_scored: int = 1
    """Prompt tokens whose scores were delivered; the first has none."""
    arrived_s: float = math.nan
    """Monotonic clock at submission."""

    def num_until_stop(self, token_ids: Seq[int]) -> int:
        """Tokens up to the first that ends an answer, that one included; all of them if none does."""
        if self.stop_token_ids.isdisjoint(token_ids):  # nearly always
            return len(token_ids)
        return next(index for index, token_id in enumerate(token_ids, 1) if token_id in self.stop_token_ids)

    def off_reason(self, speculation_off_reason: str, gate_off_reason: str) -> OffReason | None:
        """Why nothing was drafted; None where something was.

        `speculation_off_reason` holds for the whole engine, `gate_off_reason` is why a row that could be drafted was
        not; choices have their own.
        """
        if any(sequence.num_drafted for sequence in self.choices):
            return None
        if speculation_off_reason:
            return OffReason("server", speculation_off_reason)
        if self.max_draft_tokens == 0:
            return OffReason("request", "the request asked for no drafts")
        if lost := next((sequence.context_lost for sequence in self.choices if sequence.context_lost), ""):
            return OffReason("context", lost)
        if gate_off_reason and any(sequence.num_steps > 1 for sequence in self.choices):
            return OffReason("gate", gate_off_reason)
        return OffReason("short", "the answer ended before a draft was possible")

    def summary(self, off_reason: OffReason | None) -> Summary:
        """The end of the request."""
        choices = tuple(sequence.summary() for sequence in self.choices)
        words = off_reason.words if off_reason is not None else ""
        return Summary(choices, len(self.prompt), self.error, words, self.num_cached_tokens or 0)


Delivery: TypeAlias = "tuple[Callable[[Event], Any], Event]"
"""A sink and the event it is to get."""
