"""The truth: one row, one slot at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.markov_sample import BlockDraft, ConfidenceHead, MarkovHead, MarkovKind
from kernels.philox import Purpose, coupled_exponentials, uniforms
from kernels.sampling import Regime, SlotSampling

FloatArray = npt.NDArray[np.float32]


def sample_block(
    base_logits: FloatArray,
    hidden: FloatArray,
    head: MarkovHead | None,
    confidence: ConfidenceHead | None,
    anchor_ids: npt.NDArray[np.uint32],
    sampling: Sequence[SlotSampling],
    positions: npt.NDArray[np.int64],
    rounds: npt.NDArray[np.int64],
    draft_to_target: npt.NDArray[np.uint32] | None,
    draft_probs_out: Sequence[FloatArray | None],
) -> BlockDraft:
    """Draws G drafts for each of B rows.

    Args: base_logits [B, G, Vd]; hidden [B, G, H] after the final norm; head None adds no bias; anchor_ids [B] target
    ids; positions [B] of the anchors; rounds [B]; draft_to_target [Vd], None for the identity; draft_probs_out, one
    entry a row, [at least G, Vd], its first G rows overwritten in the rejection regime and None allowed in the others.
    """
    num_rows, num_slots, draft_vocab_size = base_logits.shape
    target_ids = np.arange(draft_vocab_size, dtype=np.uint32) if draft_to_target is None else draft_to_target
    token_ids = np.empty((num_rows, num_slots), np.uint32)
    confidence_logits = np.full((num_rows, num_slots), np.inf, np.float32)
    for b in range(num_rows):
        previous_id = int(anchor_ids[b])
        state = np.zeros(0 if head is None else head.rank, np.float32)
        for k in range(num_slots):
            logits = base_logits[b, k]
            embedding = np.zeros(0, np.float32)
            if head is not None:
                embedding = head.w1[previous_id]
                feature, state = markov_feature(head, hidden[b, k], embedding, state)
                logits = logits + head.w2 @ feature
            if confidence is not None:
                confidence_logits[b, k] = confidence_logit(confidence, hidden[b, k], embedding)
            is_valid = not np.isnan(logits).any() and np.isfinite(logits.max())
            if not is_valid:
                confidence_logits[b, k] = np.nan
                logits = np.where(np.arange(draft_vocab_size) == 0, np.float32(0), np.float32(-np.inf))
            probs_out = draft_probs_out[b]
            index = _draw(
                logits,
                sampling[b],
                int(positions[b]) + 1 + k,
                int(rounds[b]),
                target_ids,
                None if probs_out is None else probs_out[k],
            )
            previous_id = int(target_ids[index])
            token_ids[b, k] = previous_id
    return BlockDraft(token_ids, confidence_logits)


def markov_feature(
    head: MarkovHead, hidden: FloatArray, embedding: FloatArray, state: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """What W2 multiplies for one slot, [r], and the state after it. hidden [H], embedding = W1[x] [r], state [r]."""
    if head.kind == MarkovKind.VANILLA:
        return embedding, state
    assert head.projection is not None
    assert head.projection_bias is not None
    if head.kind == MarkovKind.GATED:
        gate = head.projection @ np.concatenate((hidden, embedding)) + head.projection_bias
        return embedding * _sigmoid(gate), state
    joint = head.projection @ np.concatenate((state, embedding, hidden)) + head.projection_bias
    gate, candidate, output = np.split(joint, 3)
    state = _sigmoid(gate) * state + (1 - _sigmoid(gate)) * np.tanh(candidate)
    return np.tanh(output), state


def confidence_logit(confidence: ConfidenceHead, hidden: FloatArray, embedding: FloatArray) -> float:
    """Logit of one slot's confidence. hidden [H], embedding = W1[x] [r]."""
    seen = np.concatenate((hidden, embedding))[: confidence.weight.size]
    return float(confidence.weight[0] @ seen) + confidence.bias


def _sigmoid(x: FloatArray) -> FloatArray:
    sigmoid: FloatArray = np.float32(1) / (np.float32(1) + np.exp(-x))
    return sigmoid


def _draw(
    logits: FloatArray,
    sampling: SlotSampling,
    token_position: int,
    round_: int,
    target_ids: npt.NDArray[np.uint32],
    probs_out: FloatArray | None,
) -> int:
    """Draft index of one slot."""
    if sampling.regime == Regime.GREEDY:
        return int(np.argmax(logits))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    probs = weights / weights.sum()
    if sampling.regime == Regime.COUPLED:
        exponentials = coupled_exponentials(sampling.key, token_position, int(target_ids.max()) + 1)[target_ids]
        return int(np.argmin(np.divide(exponentials, probs, out=np.full_like(probs, np.inf), where=probs > 0.0)))
    assert probs_out is not None
    probs_out[:] = probs
    mass_through = np.cumsum(probs_out, dtype=np.float64)
    target_mass = uniforms(sampling.key, Purpose.DRAFT, token_position, round_, 1)[0] * mass_through[-1]
    return int(min(np.searchsorted(mass_through, target_mass, side="right"), np.flatnonzero(probs_out)[-1]))
