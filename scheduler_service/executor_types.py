"""Plain values of the executors' calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.token_scores import TokenScore
from scheduler_service.slot_updates import SlotUpdates


@dataclass(frozen=True)
class SamplingDefaults:
    """Default sampling of the target's generation_config.json; None where it sets nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class VerifierInfo:
    """The loaded target; units as in the contract."""

    contract_version: int
    model: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    page_bytes: int
    page_size: int
    eos_token_ids: frozenset[int]
    padded_rows: tuple[int, ...] = ()
    """Rows a linear layer really runs for 1, 2, 3 ... requested rows."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    inexact_reason: str = ""
    """Empty when rows are exact to the bit."""
    fingerprint: str = ""
    weight_format: str = ""
    device: str = ""
    """In words, threads included."""
    sets_verify_lens: bool = False
    """Whether a step can settle verify lengths itself (`BlockRow`)."""


@dataclass(frozen=True)
class DrafterInfo:
    """The loaded drafter; units as in the contract."""

    contract_version: int
    model: str
    block_size: int
    target_vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    page_bytes: int
    page_size: int
    elastic_block_sizes: tuple[int, ...] = ()
    """Block sizes it was trained for, ascending; empty: `block_size` alone."""
    fingerprint: str = ""
    weight_format: str = ""
    device: str = ""
    calibration: str = ""
    """How its confidences are calibrated, in words."""
    publishes_blocks: bool = False
    """Whether a call can hand its blocks to the verifier."""


@dataclass(frozen=True)
class SessionSizes:
    """What both executors provide for a session."""

    session: int
    num_slots: int
    num_pages: int
    max_model_len: int
    max_batch_tokens: int
    feature_ring_rows: int
    """0: no features, speculation is off."""
    max_draft_tokens: int
    feature_layer_ids: tuple[int, ...]
    masks_arena: str = ""
    """Name of the scheduler's token masks; empty when no row will be masked."""
    kv_page_bytes: int = 0
    """Bytes of one page in both caches together; 0: not told."""


class DraftArenas(NamedTuple):
    """Names of the drafter's shared-memory arenas."""

    draft_probs: str = ""
    draft_to_target: str = ""
    """Empty when the drafter covers the whole vocabulary."""
    blocks: str = ""


class TargetProbAsks(NamedTuple):
    """Target probabilities asked for; parallel lists."""

    rows: list[int]
    """Indices within the step's rows; rejection rows that emit."""
    positions: list[int]
    token_ids: list[int]


NO_ASKS = TargetProbAsks([], [], [])


class TargetProbs(NamedTuple):
    """Target probabilities and what was asked for."""

    asks: TargetProbAsks
    probs: npt.NDArray[np.float32]
    """[asks]; NaN where the row emitted nothing."""

    def by_row(self) -> dict[int, dict[tuple[int, int], float]]:
        """By row, then position and token."""
        found: dict[int, dict[tuple[int, int], float]] = {}
        for row, position, token_id, prob in zip(*self.asks, self.probs.tolist(), strict=True):
            found.setdefault(row, {})[position, token_id] = prob
        return found


class BlockRow(NamedTuple):
    """A row whose drafts and length the verifier finds itself, by the drafter's block."""

    row: int
    """Index within the step's rows."""
    max_drafts: int
    weight: float
    """What a token of its counts for."""


class StepCall(NamedTuple):
    """Rows of a `Step`; parallel lists over the rows."""

    step_id: int
    updates: SlotUpdates
    row_slots: list[int]
    row_starts: list[int]
    row_num_tokens: list[int]
    row_num_drafts: list[int]
    row_emits: list[bool]
    row_rounds: list[int]
    token_ids: list[int]
    """Tokens of all rows, concatenated."""
    row_chained: Sequence[bool] = ()
    """Empty: no such row."""
    prob_asks: TargetProbAsks = NO_ASKS
    row_masked: Sequence[bool] = ()
    """Whether the row's tokens are chosen under masks. Empty: no such row."""
    blocks: Sequence[BlockRow] = ()
    """In the order in which ties are broken. Empty: all drafts are in `token_ids`."""
    verify_budget: int = 0
    """Drafts of `blocks` that are verified."""


class Phase(NamedTuple):
    """A phase of a step, in nanoseconds of the monotonic clock that all processes of a node share."""

    name: str
    start_ns: int
    end_ns: int


class StepResult(NamedTuple):
    """Reply to a `StepCall`."""

    verify_lens: Sequence[int]
    accepted_lens: list[int]
    token_ids: list[int]
    """For each emitting row that did not fail: accepted drafts, then one more token."""
    failures: dict[int, str]
    """Reason by row."""
    model_ns: int
    """Forward and head."""
    accept_ns: int
    phases: list[Phase]
    scores: dict[int, list[TokenScore]]
    """Of emitted tokens, by row."""
    prompt_scores: dict[int, list[TokenScore]]
    """Of the prompt tokens after each of a row's positions."""
    target_probs: TargetProbs


class DraftCall(NamedTuple):
    """Ingests and draft rows of a `Draft`; parallel lists."""

    step_id: int
    updates: SlotUpdates
    ingest_slots: list[int]
    ingest_starts: list[int]
    ingest_counts: list[int]
    ingest_oldest_step_ids: list[int]
    ingest_newest_step_ids: list[int]
    row_slots: list[int]
    row_anchor_ids: list[int]
    row_anchor_positions: list[int]
    row_rounds: list[int]
    num_draft_tokens: int
    publishes_blocks: bool = False
    """Whether the blocks are handed to the verifier as well."""
    confidence_odds: npt.NDArray[np.float64] | None = None
    """[rows, num_draft_tokens] what the odds of confidences are multiplied by before survivals are made of them for the
    verifier; None: 1."""


class DraftResult(NamedTuple):
    """Reply to a `DraftCall`."""

    token_ids: list[int]
    """Drafts, row-major [rows, num_draft_tokens]."""
    confidences: npt.NDArray[np.float32]
    """[rows, num_draft_tokens]."""
    draft_probs: npt.NDArray[np.float32]
    """[rows, num_draft_tokens]; NaN in rows that are not rejection rows."""
    ingest_failures: dict[int, str]
    """Reason by ingest."""
    model_ns: int
    """Ingest, backbone and head."""
