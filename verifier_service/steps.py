"""What a step asks for and answers, in plain arrays, and the checks that a request must pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from dspark.v1 import types_pb2

from kernels.token_scores import TokenScore
from service_kit.errors import InvalidRequestError
from service_kit.slots import SlotTable
from verifier_service.model import TokenRows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockRows:
    """Rows of a step that take their drafts from the drafter's blocks, in the order in which ties are broken."""

    rows: Ints
    max_drafts: Ints
    weights: npt.NDArray[np.float64]
    budget: int
    """Drafts of all of them that are verified."""


@dataclass(frozen=True)
class StepBatch:
    """One step; fields as in StepRequest. Arrays run over rows, except `token_ids` over the tokens of all rows."""

    session: int
    epoch: int
    step_id: int
    slots: types_pb2.SlotUpdates
    row_slots: Ints
    row_starts: Ints
    row_num_tokens: Ints
    row_num_drafts: Ints
    row_emits: npt.NDArray[np.bool_]
    row_rounds: Ints
    token_ids: Ints
    row_chained: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Empty: no such row."""
    prob_asks: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    """[asks, 3]: row, position and token of each target probability asked for."""
    row_masked: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Empty: no such row."""
    blocks: BlockRows | None = None
    """None: all drafts are in `token_ids`."""


class Emission(NamedTuple):
    """The last token a slot emitted in a step."""

    position: int
    token_id: int


class Window(NamedTuple):
    """What one emitting row verifies."""

    row: int
    slot: int
    anchor: int
    """Position of the anchor."""
    token_ids: Ints
    """The anchor, then the drafts."""
    round: int

    @property
    def draft_ids(self) -> Ints:
        """The drafts."""
        return self.token_ids[1:]


class FailedRow(NamedTuple):
    """A row that could not be served."""

    row: int
    reason: str


@dataclass
class Acceptance:
    """What the rows of a step commit; fields as in StepResponse."""

    verify_lens: list[int]
    accepted_lens: list[int]
    token_ids: list[int] = field(default_factory=list)
    failures: list[FailedRow] = field(default_factory=list)
    emissions: dict[int, Emission] = field(default_factory=dict)
    """By slot; what chained rows of the next step start from."""
    scores: dict[int, list[TokenScore]] = field(default_factory=dict)
    """By row, of its tokens; rows whose slot asks for them."""
    prompt_scores: dict[int, list[TokenScore]] = field(default_factory=dict)
    """By row; see RowScores of the contract."""
    target_probs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[asks]; NaN where there is none."""


class Phase(NamedTuple):
    """A phase of a step, in nanoseconds of the monotonic clock."""

    name: str
    start_ns: int
    end_ns: int


class StepResult(NamedTuple):
    """Answer to a step."""

    accepted: Acceptance
    phases: list[Phase]
    """Those of StepResponse.timings."""


class EmittedRows(NamedTuple):
    """Where the logits of emitting rows are."""

    rows: Ints  # [num_emitting] indices of the rows
    offsets: Ints  # [num_emitting] first of the row's logits among all logits
    token_rows: Ints  # [num_logits] token row of each logits row


def validate(batch: StepBatch, slots: SlotTable, vocab_size: int, max_batch_tokens: int, max_row_tokens: int) -> None:
    """Checks a step against the session, after its slot updates were applied.

    Raises InvalidRequestError naming the field, or SessionMismatchError for a slot or page that was not given.
    """
    arrays = ("row_slots", "row_starts", "row_num_tokens", "row_num_drafts", "row_emits", "row_rounds")
    if len({len(getattr(batch, name)) for name in arrays}) != 1:
        raise InvalidRequestError("row arrays have different lengths", field="row_slots")
    counts, drafts, num_tokens = batch.row_num_tokens, batch.row_num_drafts, len(batch.token_ids)
    if counts.sum() != num_tokens:
        raise InvalidRequestError(f"rows have {counts.sum()} tokens, token_ids {num_tokens}", field="token_ids")
    if num_tokens > max_batch_tokens:
        raise InvalidRequestError(f"{num_tokens} tokens are more than max_batch_tokens {max_batch_tokens}")
    if num_tokens and batch.token_ids.max() >= vocab_size:
        raise InvalidRequestError(
            f"token {batch.token_ids.max()} is outside the vocabulary of {vocab_size}", field="token_ids"
        )
    if len(np.unique(batch.row_slots)) != len(batch.row_slots):
        raise InvalidRequestError("a slot has two rows", field="row_slots")
    if (counts < 1).any() or (counts > max_row_tokens).any():
        raise InvalidRequestError(f"a row needs 1 ... {max_row_tokens} tokens", field="row_num_tokens")
    if (drafts >= counts).any() or (drafts[~batch.row_emits] > 0).any():
        raise InvalidRequestError("drafts need an anchor before them and a row that emits", field="row_num_drafts")
    if len(batch.row_chained) not in (0, len(counts)):
        raise InvalidRequestError("row_chained has another length than the other row arrays", field="row_chained")
    chained = np.flatnonzero(batch.row_chained)
    if (counts[chained] > 1).any() or not batch.row_emits[chained].all():
        raise InvalidRequestError("a chained row has one token and emits", field="row_chained")
    if len(batch.row_masked) not in (0, len(counts)):
        raise InvalidRequestError("row_masked has another length than the other row arrays", field="row_masked")
    masked = np.flatnonzero(batch.row_masked)
    if not batch.row_emits[masked].all() or np.isin(masked, chained).any():
        raise InvalidRequestError("a masked row emits and is not chained", field="row_masked")
    rows, _, token_ids = batch.prob_asks.T
    if (rows >= len(counts)).any() or not batch.row_emits[rows].all():
        raise InvalidRequestError("probabilities are asked of a row that does not emit", field="prob_rows")
    if (token_ids >= vocab_size).any():
        raise InvalidRequestError(
            f"token {token_ids.max()} is outside the vocabulary of {vocab_size}", field="prob_token_ids"
        )
    for slot, start, count in zip(batch.row_slots.tolist(), batch.row_starts.tolist(), counts.tolist(), strict=True):
        slots.require_span(slot, 0, start + count)  # attention reads every page before the row, too


def fill_chained(batch: StepBatch, emissions: Mapping[int, Emission]) -> dict[int, str]:
    """Writes tokens of the step before into `batch.token_ids` for chained rows; returns rows without one, and why.

    Such a row is run with the token that is there: only its own position is written, and its slot's next step does so
    again before anything reads it.
    """
    failed: dict[int, str] = {}
    ends = np.cumsum(batch.row_num_tokens)
    for row in np.flatnonzero(batch.row_chained).tolist():
        slot, start = int(batch.row_slots[row]), int(batch.row_starts[row])
        emission = emissions.get(slot)
        if emission is None or emission.position != start:
            failed[row] = f"slot {slot} emitted no token for position {start} in the step before"
        else:
            batch.token_ids[ends[row] - 1] = emission.token_id
    return failed


def token_rows(batch: StepBatch) -> TokenRows:
    """Every token of the batch as a row of the forward."""
    counts = batch.row_num_tokens
    shift = batch.row_starts - (np.cumsum(counts) - counts)  # position minus index, per row
    positions = np.arange(len(batch.token_ids)) + np.repeat(shift, counts)
    slots = np.repeat(batch.row_slots, counts)
    return TokenRows(
        torch.from_numpy(batch.token_ids),
        torch.from_numpy(positions.astype(np.int32)),
        torch.from_numpy(slots.astype(np.int32)),
    )


def emitted_rows(batch: StepBatch) -> EmittedRows:
    """The last 1 + num_drafts token rows of each emitting row: those that need logits."""
    rows = np.flatnonzero(batch.row_emits)
    counts = batch.row_num_drafts[rows] + 1
    offsets = np.cumsum(counts) - counts
    shift = np.cumsum(batch.row_num_tokens)[rows] - counts - offsets
    return EmittedRows(rows, offsets, np.arange(counts.sum()) + np.repeat(shift, counts))


def window_of(batch: StepBatch, row: int, end: int) -> Window:
    """The window of a row whose tokens end before index `end` of the batch's."""
    num_tokens = int(batch.row_num_drafts[row]) + 1
    anchor = int(batch.row_starts[row] + batch.row_num_tokens[row]) - num_tokens
    token_ids = batch.token_ids[end - num_tokens : end]
    return Window(row, int(batch.row_slots[row]), anchor, token_ids, int(batch.row_rounds[row]))
