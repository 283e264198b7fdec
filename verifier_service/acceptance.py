"""Acceptance of a step's rows: greedy ones from one arg max, the others through the rejection-sampling kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.rejection_sample import InvalidRowError, RowOutcome
from kernels.sampling import Regime
from service_kit.errors import StaleArenaError
from verifier_service.session import Session
from verifier_service.steps import Acceptance, Emission, EmittedRows, FailedRow, Ints, StepBatch


def accept(
    session: Session,
    batch: StepBatch,
    emitted: EmittedRows,
    logits: Tensor,
    accept_row: Callable[..., RowOutcome],
    failed: Mapping[int, str],
) -> Acceptance:
    """Accepts drafts row by row. A row with unusable logits or another round's draft distributions fails alone.

    `logits` is [num_logits, vocab], in the order of `emitted`; `failed` names rows whose logits mean nothing, and why.
    """
    num_rows = len(batch.row_slots)
    result = Acceptance([0] * num_rows, [0] * num_rows)
    if not len(emitted.rows):
        return result
    all_logits = logits.numpy()
    best_ids = all_logits.argmax(axis=1)  # the first of equal logits; a NaN if there is one
    is_finite = np.isfinite(all_logits[np.arange(len(best_ids)), best_ids])
    ends = np.cumsum(batch.row_num_tokens)
    for row, offset in zip(emitted.rows.tolist(), emitted.offsets.tolist(), strict=True):
        num_drafts = int(batch.row_num_drafts[row])
        own = slice(offset, offset + num_drafts + 1)
        draft_ids = batch.token_ids[ends[row] - num_drafts : ends[row]]
        try:
            if row in failed:
                raise InvalidRowError(failed[row])
            if not is_finite[own].all():
                raise InvalidRowError("the target's logits are not finite")
            if session.sampling(batch.row_slots[row]).regime == Regime.GREEDY:
                accepted_len = int((best_ids[own][:-1] == draft_ids).cumprod().sum())
                outcome = RowOutcome(accepted_len, best_ids[own][: accepted_len + 1].tolist())
            else:
                outcome = _sample(session, batch, row, draft_ids, all_logits[own], accept_row)
        except (InvalidRowError, StaleArenaError) as error:
            result.failures.append(FailedRow(row, str(error)))
            continue
        result.verify_lens[row], result.accepted_lens[row] = num_drafts, outcome.accepted_len
        result.token_ids += outcome.token_ids
        position = int(batch.row_starts[row] + batch.row_num_tokens[row]) - num_drafts + outcome.accepted_len
        result.emissions[int(batch.row_slots[row])] = Emission(position, outcome.token_ids[-1])
    return result


def _sample(
    session: Session,
    batch: StepBatch,
    row: int,
    draft_ids: Ints,
    logits: npt.NDArray[np.float32],
    accept_row: Callable[..., RowOutcome],
) -> RowOutcome:
    slot, round_, num_drafts = int(batch.row_slots[row]), int(batch.row_rounds[row]), len(draft_ids)
    anchor = int(batch.row_starts[row] + batch.row_num_tokens[row]) - num_drafts - 1
    sampling = session.sampling(slot)
    draft_probs = None
    if num_drafts and sampling.regime == Regime.REJECTION:
        draft_probs = session.draft_probs(slot, round_, anchor + 1, num_drafts)
    return accept_row(
        logits,
        draft_ids.astype(np.uint32),
        draft_probs,
        session.draft_to_target,
        sampling,
        anchor,
        round_,
    )
