"""Which rows are drafted, and how many slots: decided before the draft pass, from history alone (design 6)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from scheduler_service.draft_history import DraftedRounds, Ints
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


class Candidates(NamedTuple):
    """Rows that may be drafted; parallel arrays."""

    slots: Ints
    """[rows]: where the gate keeps what it knows of them."""
    context_lens: Ints
    """[rows] tokens so far."""
    max_drafts: Ints
    """[rows] most drafts each may verify; at least 1."""

    @property
    def num_rows(self) -> int:
        """How many."""
        return self.slots.size


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


class DraftGate(ABC):
    """Decides what to draft, and is told what came of it."""

    def begin(self, slot: int, context_len: int) -> None:  # noqa: B027 - optional
        """A sequence of `context_len` tokens takes the slot."""

    def look_ahead(self, shape: StepShape, candidates: Candidates) -> None:  # noqa: B027 - optional
        """Considers the step that `decide` is asked about next, as it will be if all goes on: there is time now."""

    @abstractmethod
    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        """What the step should draft. Nothing counts as drafted yet: a plan may be thrown away."""

    @abstractmethod
    def survivals(self, candidates: Candidates) -> npt.NDArray[np.float64]:
        """[candidates, block] probability by history that each draft is accepted, 0 from `max_drafts` on."""

    def drafting(self, candidates: Candidates, decision: DraftDecision) -> None:  # noqa: B027 - optional
        """`decision` is carried out."""

    def observe_plain(self, shape: StepShape, elapsed_ns: int, *, is_steady: bool, is_disturbed: bool) -> float:
        """A step without drafts took `elapsed_ns`; returns the time that drafting made of it, below 0 if it cost some.

        `is_steady`: it tells what plain steps take. `is_disturbed`: it came behind a drafted step, or waited for the
        drafter.
        """
        return 0.0

    def observe_drafted(
        self,
        shape: StepShape,
        decision: DraftDecision,
        rounds: DraftedRounds,
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

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        """All of them."""
        count = candidates.num_rows
        return DraftDecision(list(range(count)), self._num_slots) if count else NOTHING

    def survivals(self, candidates: Candidates) -> npt.NDArray[np.float64]:
        """Nothing is known."""
        return np.zeros((candidates.num_rows, self._num_slots))
