"""The interface of a verify policy.

Lossless by rule (design 5.1): whether draft k of a row is verified may depend only on what was known before it was
drawn. The confidence of draft k is known then (it does not see draft k), that of draft k + 1 is not.

Glossary. *Confidence* c[r, k]: probability that draft k of row r survives given that all before it did. *Survival*
a[r, k] = c[r, 1] · … · c[r, k]. *Window*: the leading drafts of a row that are verified. *Budget*: drafts verified in a
step, over all rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.survival import survivals, usable_lens


class StepWork(NamedTuple):
    """A step before any draft is added to it; all known before drafting."""

    num_rows: int
    """R: rows of the step, prefill chunks included."""
    num_drafted: int
    """D: rows drafted."""
    num_tokens: int
    """M: token rows, anchors and prefill chunks."""
    num_context: float
    """C: positions of context read, summed over the token rows."""
    block_len: int = 0
    """Drafts in the block of each drafted row; 0: whole blocks."""


class StepCosts(Protocol):
    """What a step costs."""

    def total_ns(self, work: StepWork, contexts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Nanoseconds of the whole step with the first 0, 1 … n drafts verified; [n + 1], positive.

        `contexts`: [n] positions of context that each further draft reads, in the order in which drafts are added.
        Entry i must follow from the first i of them alone: what comes later may depend on the drafts judged here.
        """
        ...


@dataclass(frozen=True)
class DraftedBatch:
    """What a policy may look at. Everything but `confidences` was fixed before drafting."""

    confidences: npt.NDArray[np.float32]
    """[drafted rows, drafts]: probability that a draft survives given that all before it in its row did."""
    max_drafts: Sequence[int] | npt.NDArray[np.intp]
    """Most drafts each drafted row may verify."""
    num_emitting: int
    """Rows of the step that emit at least one token, drafted or not."""
    num_tokens: int
    """Token rows of the step before any draft: anchors and prefill chunks."""
    row_keys: Sequence[Hashable] = ()
    """Identity of each drafted row, the same in every step and never given to another; empty: rows have no history."""
    contexts: Sequence[int] | npt.NDArray[np.intp] = ()
    """Positions of context each draft of a row reads; empty: not counted."""
    num_rows: int = 0
    """Rows of the step; 0: those that emit."""
    num_context: float = 0.0
    """Positions of context read before any draft, summed over the token rows."""
    row_weights: Sequence[float] | npt.NDArray[np.float64] = ()
    """What a token of each drafted row counts for in the objective, positive (priorities); empty: 1."""
    max_budget: int | None = None
    """Most drafts verified in the step (latency targets); None: no bound."""

    @property
    def work(self) -> StepWork:
        """The step without drafts."""
        num_rows, block_len = self.num_rows or self.num_emitting, self.confidences.shape[1]
        return StepWork(num_rows, len(self.max_drafts), self.num_tokens, self.num_context, block_len)

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[drafted rows]."""
        return np.asarray(self.row_weights, np.float64) if len(self.row_weights) else np.ones(len(self.max_drafts))

    @property
    def plain_gain(self) -> float:
        """What the step is worth if no draft survives: a token of each emitting row."""
        return self.num_emitting + float(np.sum(self.row_weights)) - len(self.row_weights)

    def within_budget(self, count: int) -> int:
        """Drafts to admit of `count`."""
        return count if self.max_budget is None else min(count, self.max_budget)

    def contexts_of(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """Context read by a draft of each given row."""
        return np.asarray(self.contexts, np.float64)[rows] if len(self.contexts) else np.zeros(rows.size)


class Windows(NamedTuple):
    """What becomes of each drafted row's block."""

    verify_lens: list[int]
    """Drafts that the target verifies."""
    commit_lens: list[int]
    """Most drafts that may be committed, at most `verify_lens`; of what the verifier emits for a row, its first
    `commit_lens + 1` tokens (see `cap_accept.commit_cut`)."""
    num_invalid: int
    """Rows whose window ended early by a confidence that is NaN or outside [0, 1] (design 5.8)."""


class VerifyPolicy(ABC):
    """Chooses the windows of a step's drafted rows."""

    settles_budget = False
    """Whether `budget` is to be asked before a step is drafted."""

    def budget(self, batch: DraftedBatch) -> int | None:
        """Drafts that the step verifies, those of highest survival, where older confidences alone settle that: whoever
        has the confidences of now can choose the windows then. `batch` is prepared. None: `windows` follows, which
        needs them here; else `spent` does."""
        return None

    def spent(self, batch: DraftedBatch) -> None:  # noqa: B027 - optional
        """The confidences of a step whose windows were chosen elsewhere."""

    def prepare(self, batch: DraftedBatch) -> None:  # noqa: B027 - optional
        """Does while the drafter works what its answer does not matter for: `windows` follows for the same batch, whose
        confidences are of no meaning yet."""

    def windows(self, batch: DraftedBatch) -> Windows:
        """The windows of one step; called once a step in which rows were drafted, in order."""
        usable, num_invalid = usable_lens(batch.confidences, batch.max_drafts)
        lens: list[int] = self.choose(batch, usable, survivals(batch.confidences, usable)).tolist()
        return Windows(lens, lens, num_invalid)

    @abstractmethod
    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        """[drafted rows] window of each row, at most `usable`: [drafted rows] drafts with usable confidences within
        the row's limit. `survival`: [drafted rows, drafts], 0 from `usable` on."""
