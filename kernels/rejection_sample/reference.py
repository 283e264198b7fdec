"""The truth: the rule as it is written, over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.philox import Purpose, coupled_exponentials, uniforms
from kernels.rejection_sample import AskedToken, InvalidRowError, RowOutcome, answer_asks
from kernels.sampling import Regime, SlotSampling
from kernels.target_probs.reference import target_probs


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
    """Judges the l drafts of a row.

    Args: logits [l + 1, V], target rows of [anchor, drafts]; draft_ids [l], target ids; draft_probs [l, Vd], read by
    the rejection regime only; draft_to_target [Vd], distinct target ids of the draft vocabulary, None for the
    identity; position of the anchor; round_ of the Draft call that made the drafts; asked, tokens below V whose target
    probability is wanted, answered by the rejection regime.

    Raises InvalidRowError for logits, draft ids or draft probabilities that cannot be sampled from.
    """
    vocab_size = logits.shape[1]
    answers = [math.nan] * len(asked)
    for k, draft_id in enumerate(draft_ids):
        if draft_id >= vocab_size:
            raise InvalidRowError(f"draft {k} is token {draft_id}, the target has {vocab_size}")
        probs = target_probs(logits[k : k + 1], sampling)[0]
        token_position = position + 1 + k
        if sampling.regime != Regime.REJECTION:
            token_id = _certain_token(probs, sampling, token_position)
        else:
            answer_asks(asked, k, probs, answers)
            draft_row = None if draft_probs is None else draft_probs[k]
            draft_dist = _draft_distribution(draft_row, draft_to_target, int(draft_id), vocab_size)
            chance = uniforms(sampling.key, Purpose.ACCEPT, token_position, round_, 1)[0]
            if chance * draft_dist[draft_id] < probs[draft_id]:
                continue
            residual = np.maximum(probs - draft_dist, 0.0)
            # Rejected with nothing left over: the two distributions are equal up to rounding.
            token_id = _draw(
                residual if residual.sum() > 0.0 else probs, sampling.key, Purpose.RESIDUAL, token_position, round_
            )
        if token_id != draft_id:
            return RowOutcome(k, [*map(int, draft_ids[:k]), token_id], tuple(answers))

    num_drafts = len(draft_ids)
    probs = target_probs(logits[num_drafts : num_drafts + 1], sampling)[0]
    token_position = position + 1 + num_drafts
    if sampling.regime == Regime.REJECTION:
        answer_asks(asked, num_drafts, probs, answers)
        token_id = _draw(probs, sampling.key, Purpose.BONUS, token_position, round_)
    else:
        token_id = _certain_token(probs, sampling, token_position)
    return RowOutcome(num_drafts, [*map(int, draft_ids), token_id], tuple(answers))


def _certain_token(probs: npt.NDArray[np.float64], sampling: SlotSampling, token_position: int) -> int:
    """The token a greedy or coupled target chooses; drafts have no say in it."""
    if sampling.regime == Regime.GREEDY:
        return int(np.argmax(probs))
    exponentials = coupled_exponentials(sampling.key, token_position, probs.size)
    return int(np.argmin(np.divide(exponentials, probs, out=np.full_like(probs, np.inf), where=probs > 0.0)))


def _draft_distribution(
    draft_row: npt.NDArray[np.float32] | None,
    draft_to_target: npt.NDArray[np.uint32] | None,
    draft_id: int,
    vocab_size: int,
) -> npt.NDArray[np.float64]:
    """Draft distribution over target ids, [V]; the point mass where `draft_row` cannot have produced the draft."""
    draft_dist = np.zeros(vocab_size)
    if draft_row is not None:
        total = draft_row.sum(dtype=np.float64)
        if not (np.isfinite(total) and total > 0.0 and draft_row.min() >= 0.0):
            raise InvalidRowError("draft probabilities hold NaN, inf or negative values, or no mass")
        target_ids = np.arange(draft_row.size) if draft_to_target is None else draft_to_target
        draft_dist[target_ids] = draft_row / total
    if draft_dist[draft_id] > 0.0:
        return draft_dist
    point_mass = np.zeros(vocab_size)
    point_mass[draft_id] = 1.0
    return point_mass


def _draw(weights: npt.NDArray[np.float64], key: int, purpose: Purpose, position: int, round_: int) -> int:
    """Inverse-CDF draw from unnormalised weights."""
    mass_through = np.cumsum(weights)
    target_mass = uniforms(key, purpose, position, round_, 1)[0] * mass_through[-1]
    return int(min(np.searchsorted(mass_through, target_mass, side="right"), np.flatnonzero(weights)[-1]))
