"""Steps that settle their verify lengths themselves: rows that take their drafts from the drafter's blocks.

The scheduler gives the number of drafts to verify in all, settled by older confidences; which ones those are follows
here from the survivals of now, by the scheduler's own rule (`kernels/verify_lens`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from service_kit.errors import InvalidRequestError
from verifier_service.session import Session
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import Ints, StepBatch


def check_blocks(batch: StepBatch, sizes: SessionSizes) -> None:
    """Raises InvalidRequestError, naming the field, for blocks that no step can have. What can be said of a step with
    its drafts in it is left to `steps.validate`."""
    blocks, num_rows = batch.blocks, len(batch.row_slots)
    if blocks is None:
        return
    rows = blocks.rows
    if len({len(rows), len(blocks.max_drafts), len(blocks.weights)}) != 1:
        raise InvalidRequestError("block arrays have different lengths", field="block_rows")
    for name in ("row_starts", "row_num_tokens", "row_num_drafts", "row_emits", "row_rounds"):
        if len(getattr(batch, name)) != num_rows:
            raise InvalidRequestError("row arrays have different lengths", field=name)
    if len(np.unique(rows)) != len(rows) or rows.max() >= num_rows:
        raise InvalidRequestError("blocks are of rows of the step, one of each", field="block_rows")
    if batch.row_slots.max() >= sizes.num_slots:
        raise InvalidRequestError(f"slots are 0 ... {sizes.num_slots - 1}", field="row_slots")
    is_plain = batch.row_emits[rows] & (batch.row_num_tokens[rows] == 1)
    for flags in (batch.row_chained, batch.row_masked):
        is_plain &= ~flags[rows] if len(flags) == num_rows else True
    if not is_plain.all():
        raise InvalidRequestError(
            "a row with a block is its anchor alone, emits, and is neither chained nor masked", field="block_rows"
        )
    if batch.row_num_drafts.any():
        raise InvalidRequestError("drafts are in blocks or in token_ids, not in both", field="row_num_drafts")
    if (blocks.max_drafts < 1).any() or (blocks.max_drafts > sizes.max_draft_tokens).any():
        raise InvalidRequestError(f"a block has 1 ... {sizes.max_draft_tokens} drafts", field="block_max_drafts")
    if not (np.isfinite(blocks.weights) & (blocks.weights > 0)).all():
        raise InvalidRequestError("weights are positive numbers", field="block_weights")


def block_windows(batch: StepBatch) -> Ints:
    """Slot, round and position of the first draft of each block, [blocks, 3]; none without blocks."""
    rows = np.zeros(0, np.int64) if batch.blocks is None else batch.blocks.rows
    return np.stack((batch.row_slots[rows], batch.row_rounds[rows], batch.row_starts[rows] + 1), axis=1)


def missing_blocks(session: Session, batch: StepBatch) -> dict[int, str]:
    """Rows whose block did not come, and why; they are run without drafts. The step's slot updates have been applied.

    Raises SessionMismatchError for a slot without pages for its drafts.
    """
    blocks, windows = batch.blocks, block_windows(batch)
    if blocks is None:
        return {}
    for (slot, _, first), count in zip(windows.tolist(), blocks.max_drafts.tolist(), strict=True):
        session.slots.require_span(slot, first, count)
    return {
        int(blocks.rows[index]): "the block of slot {}, round {} and position {} did not come".format(*windows[index])
        for index in np.flatnonzero(~session.blocks.are_there(windows))
    }


def settle(
    session: Session, batch: StepBatch, missing: Mapping[int, str], verify_lens: Callable[..., None]
) -> StepBatch:
    """The step with the drafts that it verifies, by blocks on the host; `missing` as `missing_blocks`."""
    blocks = batch.blocks
    if blocks is None or len(missing) == len(blocks.rows):
        return replace(batch, blocks=None)
    read = session.blocks.read(batch.row_slots[blocks.rows])
    is_there = np.array([int(row) not in missing for row in blocks.rows])
    lens = torch.zeros(len(blocks.rows), dtype=torch.int32)
    verify_lens(
        torch.from_numpy(read[:, 1] * blocks.weights[:, None]),
        torch.from_numpy(np.where(is_there, blocks.max_drafts, 0).astype(np.int32)),
        torch.tensor([blocks.budget]),
        lens,
    )
    # Of a missing block anything may be there; nothing of it is taken.
    token_ids = np.where(is_there[:, None], read[:, 0], 0).astype(np.int64)
    return with_drafts(batch, blocks.rows, lens.numpy().astype(np.int64), token_ids)


def with_drafts(batch: StepBatch, rows: Ints, lens: Ints, token_ids: Ints) -> StepBatch:
    """The step in which each of `rows` verifies its first `lens` of `token_ids` [rows, drafts]."""
    added = np.zeros_like(batch.row_num_tokens)
    added[rows] = lens
    is_verified = np.arange(token_ids.shape[1]) < lens[:, None]
    places = np.repeat(np.cumsum(batch.row_num_tokens)[rows], lens)
    return replace(
        batch,
        row_num_tokens=batch.row_num_tokens + added,
        row_num_drafts=batch.row_num_drafts + added,
        token_ids=np.insert(batch.token_ids, places, token_ids[is_verified]),
        blocks=None,
    )
