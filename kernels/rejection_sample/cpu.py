"""numpy: distributions are computed row by row and only up to the first rejection."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.draws import coupled_index, inverse_cdf_index, uniform
from kernels.philox import Purpose
from kernels.rejection_sample import AskedToken, InvalidRowError, RowOutcome, answer_asks
from kernels.sampling import Regime, SlotSampling
from kernels.target_probs.cpu import greedy_token, target_probs


def accept_row(
    logits: npt.NDArray[np.float32],
    draft_ids: npt.NDArray[np.uint32],
    draft_probs: npt.NDArray[np.float32] | None,
    draft_to_target: npt.NDArray[np.uint32] | None,
    sampling: SlotSampling,
    position: int,
    round_: int,
    asked: Sequence[AskedToken] = (),
) -> RowOutcome:
    """Judges the l drafts of a row; arguments and errors of `kernels.rejection_sample.reference.accept_row`."""
    drafts: list[int] = draft_ids.tolist()
    answers = [math.nan] * len(asked)
    if drafts and max(drafts) >= logits.shape[1]:
        raise InvalidRowError(f"drafts {drafts} are not all below the target's vocabulary of {logits.shape[1]}")
    for k, draft_id in enumerate(drafts):
        token_position = position + 1 + k
        if sampling.regime == Regime.REJECTION:
            draft_row = None if draft_probs is None else draft_probs[k]
            probs = _row_probs(logits[k], sampling)
            answer_asks(asked, k, probs, answers)
            token_id = _judge(probs, draft_id, draft_row, draft_to_target, sampling, token_position, round_)
        else:
            token_id = _certain_token(logits[k], sampling, token_position)
        if token_id != draft_id:
            return RowOutcome(k, [*drafts[:k], token_id], tuple(answers))

    token_position = position + 1 + len(drafts)
    if sampling.regime == Regime.REJECTION:
        chance = uniform(sampling.key, Purpose.BONUS, token_position, round_)
        probs = _row_probs(logits[len(drafts)], sampling)
        answer_asks(asked, len(drafts), probs, answers)
        token_id = inverse_cdf_index(probs, chance)
    else:
        token_id = _certain_token(logits[len(drafts)], sampling, token_position)
    return RowOutcome(len(drafts), [*drafts, token_id], tuple(answers))


def _certain_token(row: npt.NDArray[np.float32], sampling: SlotSampling, token_position: int) -> int:
    """The token a greedy or coupled target chooses; drafts have no say in it."""
    if sampling.regime == Regime.GREEDY:
        return greedy_token(row)
    probs = _row_probs(row, sampling)
    if not sampling.is_filtered:
        return coupled_index(probs, None, sampling.key, token_position)
    kept_ids = np.flatnonzero(probs > 0.0)
    return int(kept_ids[coupled_index(probs[kept_ids], kept_ids, sampling.key, token_position)])


def _judge(
    probs: npt.NDArray[np.float64],
    draft_id: int,
    draft_row: npt.NDArray[np.float32] | None,
    draft_to_target: npt.NDArray[np.uint32] | None,
    sampling: SlotSampling,
    token_position: int,
    round_: int,
) -> int:
    """The draft if it is accepted, else the recovered token."""
    draft_prob, total = 0.0, 1.0
    if draft_row is not None:
        total = float(draft_row.sum(dtype=np.float64))
        if not (np.isfinite(total) and total > 0.0 and draft_row.min() >= 0.0):
            raise InvalidRowError("draft probabilities hold NaN, inf or negative values, or no mass")
        columns = np.flatnonzero(draft_to_target == draft_id) if draft_to_target is not None else [draft_id]
        draft_prob = sum(float(draft_row[column]) for column in columns if column < draft_row.size) / total
    is_certain = draft_row is None or draft_prob == 0.0  # the point mass
    chance = uniform(sampling.key, Purpose.ACCEPT, token_position, round_)
    if chance * (1.0 if is_certain else draft_prob) < probs[draft_id]:
        return draft_id

    residual = probs.copy()
    if draft_row is None or is_certain:
        residual[draft_id] = 0.0
    else:
        target_ids = slice(draft_row.size) if draft_to_target is None else draft_to_target
        residual[target_ids] -= np.divide(draft_row, total, dtype=np.float64)
    np.maximum(residual, 0.0, out=residual)
    chance = uniform(sampling.key, Purpose.RESIDUAL, token_position, round_)
    # Rejected with nothing left over: the two distributions are equal up to rounding.
    return inverse_cdf_index(residual if residual.any() else probs, chance)


def _row_probs(row: npt.NDArray[np.float32], sampling: SlotSampling) -> npt.NDArray[np.float64]:
    probs: npt.NDArray[np.float64] = target_probs(row[np.newaxis], sampling)[0]
    return probs
