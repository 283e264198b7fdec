"""What a step runs: its rows, their drafts, and how far features are ingested first."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernels.token_scores import TokenScore
from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, StepShape
from scheduler_service.executor_types import BlockRow, DraftResult
from scheduler_service.policy import Windows
from scheduler_service.request import Sequence, StepReport


@dataclass(slots=True)
class PlannedRow:
    """One row of the step: `num_tokens` tokens from position `start`, then up to `max_drafts` drafts."""

    sequence: Sequence
    start: int
    num_tokens: int
    emits: bool
    is_chained: bool = False
    """Whether the row's one token is the one that the step in flight emits for the sequence."""
    is_masked: bool = False
    """Whether its tokens are chosen under the masks of the step."""
    max_drafts: int = 0
    block_ids: Seq[int] = ()
    """Its drafts as far as its limit allows to verify them; none until it is drafted."""
    drafts: Seq[int] = ()
    """Drafts to verify; filled in between planning and the verifier's call."""
    is_audit: bool = False
    """Whether the whole block is verified for its own sake, whatever the confidences (see `audit`)."""
    commit_len: int = 0
    """Most of them that may be committed."""
    committed_ids: Seq[int] = ()
    """What was appended to the text; none before the commit, and if that failed."""
    scores: Seq[TokenScore] = ()
    """Of the tokens that the verifier emitted, where the request asks for them."""
    prompt_scores: Seq[TokenScore] = ()
    """Of the prompt tokens from position `start` + 1 on."""
    report: StepReport | None = None
    """Set where the request asks for it."""

    @property
    def num_context(self) -> int:
        """Positions of context that its tokens read together, drafts left out."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2

    @property
    def is_current(self) -> bool:
        """Whether the row still goes on where its sequence stands. The result of a chained step's row is void if the
        step before it ended the sequence or failed the row."""
        return self.sequence.finish_reason is None and self.sequence.computed == self.start


@dataclass
class StepPlan:
    """The rows of a step, and how far each slot's features must be ingested first."""

    rows: list[PlannedRow] = field(default_factory=list)
    ingests: list[Sequence] = field(default_factory=list)
    """Sequences whose computed positions the drafter ingests first."""
    num_ingested: int = 0
    """Positions of theirs."""
    candidates: Candidates | None = None
    """Rows that could have been drafted; None where that was not asked."""
    decision: DraftDecision = NOTHING
    max_budget: int | None = None
    """Most drafts verified, by latency targets; None: no bound."""
    drafted: list[PlannedRow] = field(default_factory=list)
    """Rows that are drafted: those of `decision`, in its order, for which there is room."""
    budget: int | None = None
    """Drafts verified, if the verifier chooses which; `windows` is then known from its answer."""
    draft: DraftResult | None = None
    """What the drafter answered for them; None until they are drafted."""
    windows: Windows | None = None
    """What is verified and committed of their blocks; None until that is chosen."""
    confidences: npt.NDArray[np.float32] | None = None
    """[drafted, slots]: calibrated; None until they are drafted."""

    def block_rows(self) -> list[BlockRow]:
        """What the verifier is told of the drafted rows if it chooses their windows."""
        if self.budget is None:
            return []
        index_of = {id(row): index for index, row in enumerate(self.rows)}
        return [BlockRow(index_of[id(row)], row.max_drafts, row.sequence.request.priority) for row in self.drafted]

    def report(self, row: PlannedRow, num_accepted: int) -> StepReport:
        """What the step did for one of its rows, whose verifier accepted `num_accepted` drafts."""
        confidences: list[float] = []
        if self.confidences is not None and row.drafts:
            index = next(index for index, other in enumerate(self.drafted) if other is row)
            confidences = self.confidences[index, : len(row.drafts)].tolist()
        return StepReport(
            num_drafted=self.decision.num_slots if row.block_ids else 0,
            confidences=confidences,
            num_uncut_accepted=num_accepted,
            budget=sum(len(other.drafts) for other in self.rows),
            num_rows=sum(other.emits for other in self.rows),
        )


def step_shape(decoding: list[PlannedRow], num_prefill: int) -> StepShape:
    """The step as the draft gate sees it: decode rows of one token each, `num_prefill` prefill tokens beside them."""
    num_rows = len(decoding)
    context = float(sum([row.start for row in decoding]) + num_rows)
    return StepShape(num_rows + bool(num_prefill), num_rows + num_prefill, context, num_rows, context)
