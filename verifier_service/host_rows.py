"""Acceptance of some of a step's rows on the host, for steps whose other rows were accepted on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kernels.rejection_sample import RowOutcome
from verifier_service.acceptance import accept
from verifier_service.session import Session
from verifier_service.steps import Acceptance, Emission, EmittedRows, FailedRow, StepBatch


@dataclass
class RowOutcomes:
    """What became of a step's emitting rows, by row."""

    judged: dict[int, RowOutcome] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    """Of rows that could not be served."""

    def assemble(self, batch: StepBatch, emitted: EmittedRows, like: Acceptance) -> Acceptance:
        """The step's answer; scores and probabilities are those of `like`."""
        num_rows = len(batch.row_slots)
        result = replace(like, verify_lens=[0] * num_rows, accepted_lens=[0] * num_rows, token_ids=[], failures=[])
        ends = batch.row_starts + batch.row_num_tokens
        for row in emitted.rows.tolist():
            if row in self.reasons:
                result.failures.append(FailedRow(row, self.reasons[row]))
                continue
            outcome, num_drafts = self.judged[row], int(batch.row_num_drafts[row])
            result.verify_lens[row], result.accepted_lens[row] = num_drafts, outcome.accepted_len
            result.token_ids += outcome.token_ids
            position = int(ends[row]) - num_drafts + outcome.accepted_len
            result.emissions[int(batch.row_slots[row])] = Emission(position, outcome.token_ids[-1])
        return result


def accept_on_host(
    session: Session,
    batch: StepBatch,
    emitted: EmittedRows,
    logits: Tensor,
    places: Sequence[int],
    accept_row: Callable[..., RowOutcome],
    outcomes: RowOutcomes,
) -> Acceptance:
    """Accepts the rows at `places` of `emitted` as every row is on the CPU; their outcomes go to `outcomes`.

    `logits` is [num_logits, vocab] on any device, in the order of `emitted`; those of the rows wanted are fetched.
    Returns scores and probabilities, for the rows of the whole step.
    """
    own = Acceptance([], [], target_probs=np.full(len(batch.prob_asks), np.nan, np.float32))
    if not places:
        return own
    rows = emitted.rows[list(places)]
    part, asked = _part(batch, rows)
    counts = part.row_num_drafts + 1
    own_logits = [logits[emitted.offsets[place] :][:count] for place, count in zip(places, counts, strict=True)]
    accepted = accept(
        session,
        part,
        EmittedRows(np.arange(len(rows)), np.cumsum(counts) - counts, np.zeros(0, np.int64)),
        torch.cat(own_logits).float().cpu(),
        accept_row,
        {},
    )
    reasons = {failure.row: failure.reason for failure in accepted.failures}
    start = 0
    for place, row in enumerate(rows.tolist()):
        if place in reasons:
            outcomes.reasons[row] = reasons[place]
            continue
        accepted_len = accepted.accepted_lens[place]
        token_ids = accepted.token_ids[start : start + accepted_len + 1]
        outcomes.judged[row] = RowOutcome(accepted_len, token_ids)
        start += accepted_len + 1
    own.scores = {int(rows[place]): scores for place, scores in accepted.scores.items()}
    own.target_probs[asked] = accepted.target_probs
    return own


def _part(batch: StepBatch, rows: np.typing.NDArray[np.int64]) -> tuple[StepBatch, np.typing.NDArray[np.int64]]:
    """The batch of those rows alone, and which of its probabilities asked for are theirs."""
    ends = np.cumsum(batch.row_num_tokens)
    tokens = [batch.token_ids[ends[row] - batch.row_num_tokens[row] : ends[row]] for row in rows]
    number: Mapping[int, int] = {int(row): place for place, row in enumerate(rows)}
    asked = np.flatnonzero(np.isin(batch.prob_asks[:, 0], rows))
    asks = batch.prob_asks[asked].copy()
    asks[:, 0] = [number[int(row)] for row in asks[:, 0]]
    arrays = ("row_slots", "row_starts", "row_num_tokens", "row_num_drafts", "row_emits", "row_rounds")
    part = replace(
        batch,
        **{name: getattr(batch, name)[rows] for name in arrays},
        token_ids=np.concatenate(tokens),
        row_chained=np.zeros(0, np.bool_),
        row_masked=batch.row_masked[rows] if len(batch.row_masked) else batch.row_masked,
        prob_asks=asks,
    )
    return part, asked
