"""What a step did and what came of it, for whoever learns from that: calibration, estimators, traces.

A record is made after the step has been committed, so everything in it is history (design 5.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_service.executor_types import StepResult
from scheduler_service.policy import StepWork
from scheduler_service.request import Sequence
from scheduler_service.step_plan import StepPlan

_NO_NUMBERS = np.empty(0, np.float32)


@dataclass(frozen=True)
class RowRound:
    """One row that emitted, drafted or not."""

    sequence: Sequence
    """As it stands now: `finish_reason` tells whether it has ended."""
    position: int
    """Of its anchor; draft k is a token for position + 1 + k."""
    draft_ids: Seq[int]
    """The block as far as the row's limit allowed to verify it; empty if it was not drafted."""
    confidences: npt.NDArray[np.float32]
    """[drafts]: as the drafter gave them."""
    draft_probs: npt.NDArray[np.float32]
    """[drafts]: probability with which each was sampled; NaN where the row does not sample."""
    verify_len: int
    commit_len: int
    num_accepted: int
    """Drafts that the verifier accepted, at most `verify_len`; `commit_len` caps those that are committed."""
    committed_ids: Seq[int]
    """What was appended to the text; ends early where the text ends."""
    target_probs: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """What was asked of the target, by position and token: see `BlockAcceptObserver`."""
    is_audit: bool = False
    """Whether the whole block was verified for its own sake, whatever the confidences."""


@dataclass(frozen=True)
class StepRecord:
    """One step."""

    step_id: int
    work: StepWork
    """As it was run, verified drafts included in its token rows and context."""
    num_prefill: int
    """Token rows of prefill among them."""
    step_ns: int
    """Wall time of the whole step, the Draft call included."""
    draft_ns: int
    rounds: Seq[RowRound]
    """Rows that emitted after their first token."""


def row_rounds(plan: StepPlan, result: StepResult) -> list[RowRound]:
    """What came of the rows that were committed and emitted after their first token."""
    index_of = {id(row): index for index, row in enumerate(plan.drafted)}
    rounds, target_probs = [], result.target_probs.by_row()
    for index, row in enumerate(plan.rows):
        if not row.committed_ids or row.start + row.num_tokens <= len(row.sequence.request.prompt):
            continue
        confidences = draft_probs = _NO_NUMBERS
        if row.block_ids and plan.draft is not None:
            own = index_of[id(row)], slice(len(row.block_ids))
            confidences, draft_probs = plan.draft.confidences[own], plan.draft.draft_probs[own]
        rounds.append(
            RowRound(
                row.sequence,
                row.start + row.num_tokens - 1,
                row.block_ids,
                confidences,
                draft_probs,
                len(row.drafts),
                row.commit_len,
                result.accepted_lens[index],
                row.committed_ids,
                target_probs.get(index, {}),
                is_audit=row.is_audit,
            )
        )
    return rounds


class StepObserver(ABC):
    """Told of every step after its commit, on the step thread, while an executor has the next call: be quick."""

    @abstractmethod
    def observe(self, record: StepRecord) -> None:
        """Takes in a step. Must not change anything but its own state."""

    def close(self) -> None:  # noqa: B027 - optional
        """No step follows."""
