"""What goes into and comes out of the drafter's engine: plain values, no wire types but the slot updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from dspark.v1 import types_pb2

IntArray = npt.NDArray[np.int64]


class SessionSizes(NamedTuple):
    """Sizes a session is attached with."""

    num_slots: int
    num_pages: int
    max_model_len: int
    kv_page_bytes: int = 0
    """Of a page in every cache that shares kv_memory; 0: not told, the drafter's own."""


class SessionArenas(NamedTuple):
    """Names of the arenas the drafter owns in a session."""

    draft_probs: str
    draft_to_target: str
    """Empty when the drafter covers the whole vocabulary."""
    blocks: str


@dataclass(frozen=True)
class Ingests:
    """Feature rows to read, [N] each: entry i is `counts[i]` positions of slot `slots[i]` from `starts[i]`."""

    slots: IntArray
    starts: IntArray
    counts: IntArray
    oldest_step_ids: npt.NDArray[np.uint64]
    newest_step_ids: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class DraftRows:
    """Blocks to draft, [B] each."""

    slots: IntArray
    anchor_ids: IntArray
    anchor_positions: IntArray
    rounds: IntArray


@dataclass(frozen=True)
class DraftWork:
    """One Draft call."""

    slots: types_pb2.SlotUpdates
    ingests: Ingests
    rows: DraftRows
    num_drafts: int
    confidence_odds: npt.NDArray[np.float64] | None = None
    """[B, num_drafts] what the odds of confidences are multiplied by before survivals are made of them, for the blocks
    arena; None: nothing is published."""


class DraftTimings(NamedTuple):
    """Durations of a call's phases in nanoseconds; fields are the phases' names on the wire."""

    ingest: int
    backbone: int
    head: int
    total: int


@dataclass(frozen=True)
class DraftResult:
    """Result of one Draft call."""

    token_ids: npt.NDArray[np.uint32]
    """[B, num_drafts] target ids."""
    confidences: npt.NDArray[np.float32]
    """[B, num_drafts], conditional."""
    draft_probs: npt.NDArray[np.float32]
    """[B, num_drafts] probability with which each draft was sampled, NaN in rows of other regimes than rejection; empty
    if no row is of it."""
    ingest_failures: dict[int, str]
    """Index of a failed ingest → what was wrong."""
    timings: DraftTimings
