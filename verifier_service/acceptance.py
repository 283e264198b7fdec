"""Acceptance of a step's rows: greedy ones from one arg max, the others through the rejection-sampling kernel.

Masked rows and those of controlled slots go through the kernel in every regime, with their logits changed first: each
position by its mask, and by the text before it, the drafts of the window included. Scores are always of the target's
own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.logit_controls.cpu import ControlledText
from kernels.rejection_sample import AskedToken, InvalidRowError, RowOutcome
from kernels.sampling import Regime
from kernels.token_masks.cpu import mask_logits
from kernels.token_scores.cpu import token_score
from service_kit.errors import StaleArenaError
from verifier_service.session import Session
from verifier_service.steps import Acceptance, Emission, EmittedRows, FailedRow, StepBatch, Window, window_of


def accept(
    session: Session,
    batch: StepBatch,
    emitted: EmittedRows,
    logits: Tensor,
    accept_row: Callable[..., RowOutcome],
    failed: Mapping[int, str],
) -> Acceptance:
    """Accepts drafts row by row. A row with unusable logits or another round's draft distributions fails alone.

    `logits` is [num_logits, vocab], in the order of `emitted`, and is used up; `failed` names rows whose logits mean
    nothing, and why.
    """
    num_rows = len(batch.row_slots)
    asks = batch.prob_asks
    result = Acceptance([0] * num_rows, [0] * num_rows, target_probs=np.full(len(asks), np.nan, np.float32))
    if not len(emitted.rows):
        return result
    all_logits = logits.numpy()
    best_ids = all_logits.argmax(axis=1)  # the first of equal logits; a NaN if there is one
    is_finite = np.isfinite(all_logits[np.arange(len(best_ids)), best_ids])
    ends = np.cumsum(batch.row_num_tokens)
    masked = batch.row_masked if len(batch.row_masked) else np.zeros(num_rows, np.bool_)
    for row, offset in zip(emitted.rows.tolist(), emitted.offsets.tolist(), strict=True):
        window = window_of(batch, row, int(ends[row]))
        own = slice(offset, offset + len(window.token_ids))
        options = session.slots.target[window.slot]
        num_logprobs = options.num_logprobs if options else None
        scored = all_logits[own]
        places = np.flatnonzero(asks[:, 0] == row) if len(asks) else ()
        asked = [AskedToken(int(asks[i, 1]) - window.anchor - 1, int(asks[i, 2])) for i in places]
        try:
            if row in failed:
                raise InvalidRowError(failed[row])
            if not is_finite[own].all():
                raise InvalidRowError("the target's logits are not finite")
            text, is_masked = session.text(window.slot), bool(masked[row])
            if text is not None or is_masked:
                controlled = scored if num_logprobs is None else scored.copy()
                if is_masked:
                    first_position = window.anchor + 1
                    masks = session.masks.of_window(window.slot, batch.step_id, first_position, len(window.token_ids))
                    mask_logits(controlled, masks)
                if text is not None:
                    _control(text, window, controlled, is_masked=is_masked)
                outcome = _sample(session, window, controlled, accept_row, asked)
            elif session.sampling(window.slot).regime == Regime.GREEDY:
                accepted_len = int((best_ids[own][:-1] == window.draft_ids).cumprod().sum())
                outcome = RowOutcome(accepted_len, best_ids[own][: accepted_len + 1].tolist())
            else:
                outcome = _sample(session, window, scored, accept_row, asked)
        except (InvalidRowError, StaleArenaError) as error:
            result.failures.append(FailedRow(row, str(error)))
            continue
        result.verify_lens[row], result.accepted_lens[row] = len(window.draft_ids), outcome.accepted_len
        result.token_ids += outcome.token_ids
        if outcome.asked_probs:
            result.target_probs[places] = outcome.asked_probs
        result.emissions[window.slot] = Emission(window.anchor + 1 + outcome.accepted_len, outcome.token_ids[-1])
        if num_logprobs is not None:
            pairs = zip(scored, outcome.token_ids, strict=False)  # logits behind a rejected draft are left over
            result.scores[row] = [token_score(own_logits, token_id, num_logprobs) for own_logits, token_id in pairs]
    return result


def _control(text: ControlledText, window: Window, logits: npt.NDArray[np.float32], *, is_masked: bool) -> None:
    """Changes the logits of a window, [num_drafts + 1, vocab], in place. Masked ones are left alone at positions where
    controls would leave nothing: a form that can only end does so, whatever min_tokens says.

    Leaves the whole window in the text: the next one begins with a later anchor and cuts what was not accepted.
    """
    if window.anchor > len(text):
        raise InvalidRowError(f"the text is known up to position {len(text)}, the anchor is at {window.anchor}")
    text.cut(window.anchor)
    for token_id, row in zip(window.token_ids.tolist(), logits, strict=True):
        text.extend((token_id,))
        allowed = row.copy() if is_masked else None
        text.apply(row)
        if allowed is not None and np.isneginf(row.max()):
            row[:] = allowed


def _sample(
    session: Session,
    window: Window,
    logits: npt.NDArray[np.float32],
    accept_row: Callable[..., RowOutcome],
    asked: Sequence[AskedToken],
) -> RowOutcome:
    sampling, num_drafts = session.sampling(window.slot), len(window.draft_ids)
    draft_probs = None
    if num_drafts and sampling.regime == Regime.REJECTION:
        draft_probs = session.drafts.probs_of_window(window.slot, window.round, window.anchor + 1, num_drafts)
    return accept_row(
        logits,
        window.draft_ids.astype(np.uint32),
        draft_probs,
        session.drafts.draft_to_target,
        sampling,
        window.anchor,
        window.round,
        asked,
    )
