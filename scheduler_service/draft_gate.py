"""Which rows are drafted, and how many slots: decided before the draft pass, from history alone (design 6)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from scheduler_service.draft_history import RowHistory
from scheduler_service.policy.base import StepWork


class GateCosts(Protocol):
    """What a step costs, in nanoseconds."""

    def plain_ns(self, num_rows: int, num_tokens: int, num_context: float) -> float:
        """A step of `num_rows` rows with `num_tokens` token rows that read `num_context` positions, nothing drafted."""
        ...

    def step_ns(self, work: StepWork, contexts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The target's part with the first 0, 1 … n drafts verified, which read `contexts`; [n + 1]."""
        ...

    def draft_ns(self, num_drafted: int, block_len: int) -> float:
        """A draft pass over `num_drafted` rows of `block_len` slots; 0 for no rows."""
        ...


class StepShape(NamedTuple):
    """A step before drafts are added."""

    num_rows: int
    num_tokens: int
    """Token rows, prefill included."""
    num_context: float
    """Positions of context read, summed over the token rows."""
    num_decoding: int
    """Rows that go on by one token."""
    decode_context: float
    """Positions of context that those read."""


class Candidate(NamedTuple):
    """A row that may be drafted."""

    history: RowHistory | None
    """None where nothing is decided by it."""
    context_len: int
    """Its tokens so far."""
    max_drafts: int
    """Most drafts it may verify; at least 1."""


class DraftDecision(NamedTuple):
    """What is drafted."""

    rows: list[int]
    """Indices of the candidates."""
    num_slots: int
    """Slots drafted of each; 0 without rows."""
    gain_ns: float = 0.0
    """Predicted time saved against decoding plainly; below 0 for a probe."""
    probes: frozenset[int] = frozenset()
    """Those of `rows` that do not promise to pay."""
    num_accepted: float = 0.0
    """Drafts expected to be committed."""


NOTHING = DraftDecision([], 0)


class DraftedRound(NamedTuple):
    """What came of a drafted row."""

    history: RowHistory | None
    num_drafted: int
    """Slots that could have been verified: its limit, if that is less than the block."""
    num_verified: int
    num_accepted: int
    """Drafts committed."""
    confidences: Sequence[float] = ()
    """Of its drafts: what those that were not verified were worth."""


class DraftGate(ABC):
    """Decides what to draft, and is told what came of it."""

    @abstractmethod
    def new_history(self, context_len: int) -> RowHistory | None:
        """For a sequence that begins to decode."""

    @abstractmethod
    def decide(self, shape: StepShape, candidates: Sequence[Candidate]) -> DraftDecision:
        """What the step should draft. Nothing counts as drafted yet: a plan may be thrown away."""

    def drafting(self, candidates: Sequence[Candidate], decision: DraftDecision) -> None:  # noqa: B027 - optional
        """`decision` is carried out."""

    def observe_plain(self, shape: StepShape, elapsed_ns: int, *, is_steady: bool) -> None:  # noqa: B027 - optional
        """A step without drafts took `elapsed_ns`. `is_steady`: the one before it had none either."""

    def observe_drafted(
        self,
        shape: StepShape,
        decision: DraftDecision,
        rounds: Sequence[DraftedRound],
        elapsed_ns: int,
        *,
        is_steady: bool,
    ) -> float:
        """A step with drafts took `elapsed_ns`; returns the time that it saved against plain decoding, 0 if unknown.
        `is_steady`: the drafter had no more to ingest than a step brings."""
        return 0.0

    @property
    def off_reason(self) -> str:
        """Why a row is not drafted just now, in words, when it could be."""
        return ""


class OpenGate(DraftGate):
    """Drafts every row that can be, always as many slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def new_history(self, context_len: int) -> RowHistory | None:
        """None."""
        return None

    def decide(self, shape: StepShape, candidates: Sequence[Candidate]) -> DraftDecision:
        """All of them."""
        return DraftDecision(list(range(len(candidates))), self._num_slots) if candidates else NOTHING
