"""Slots in order, rows together: one W2 product a slot for all rows, on torch's threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from kernels.draws import coupled_index, inverse_cdf_index, uniform
from kernels.markov_sample import BlockDraft, ConfidenceHead, MarkovHead, MarkovKind
from kernels.philox import Purpose
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
    """Draws G drafts for each of B rows; arguments of `kernels.markov_sample.reference.sample_block`."""
    num_rows, num_slots, _ = base_logits.shape
    hidden_size = hidden.shape[-1]
    base, hiddens = torch.from_numpy(base_logits), torch.from_numpy(hidden)
    bias = None if head is None else _MarkovBias(head, hiddens)
    confidence_logits = torch.full((num_rows, num_slots), torch.inf)
    confidence_weight = torch.empty(0)
    if confidence is not None:
        confidence_weight = torch.from_numpy(confidence.weight[0])
        confidence_logits = hiddens @ confidence_weight[:hidden_size] + confidence.bias

    token_ids = np.empty((num_rows, num_slots), np.uint32)
    previous_ids = anchor_ids
    for k in range(num_slots):
        logits = base[:, k]
        if bias is not None:
            embedding = bias.embedding(previous_ids)
            logits = bias.add(logits, embedding, k)
            if confidence_weight.numel() > hidden_size:
                confidence_logits[:, k] += embedding @ confidence_weight[hidden_size:]
        slot_logits = logits.numpy()
        indices = np.argmax(slot_logits, axis=1)  # the first NaN, if there is one
        for b, row_sampling in enumerate(sampling):
            row_probs_out = draft_probs_out[b]
            probs_out = None if row_probs_out is None else row_probs_out[k]
            if not np.isfinite(slot_logits[b, indices[b]]):
                indices[b] = 0
                confidence_logits[b, k] = torch.nan
                if row_sampling.regime == Regime.REJECTION and probs_out is not None:
                    probs_out[:] = 0.0
                    probs_out[0] = 1.0
            elif row_sampling.regime != Regime.GREEDY:
                token_position = int(positions[b]) + 1 + k
                weights = _weights(slot_logits[b], row_sampling.temperature)
                if row_sampling.regime == Regime.COUPLED:
                    indices[b] = coupled_index(weights, draft_to_target, row_sampling.key, token_position)
                else:
                    assert probs_out is not None
                    np.divide(weights, weights.sum(), out=probs_out, casting="same_kind")
                    chance = uniform(row_sampling.key, Purpose.DRAFT, token_position, int(rounds[b]))
                    indices[b] = inverse_cdf_index(probs_out, chance)
        previous_ids = token_ids[:, k] = indices if draft_to_target is None else draft_to_target[indices]
    return BlockDraft(token_ids, confidence_logits.numpy())


class _MarkovBias:
    """The head over one batch of blocks: what does not depend on drafted tokens is computed for all slots at once."""

    def __init__(self, head: MarkovHead, hiddens: Tensor) -> None:
        """hiddens [B, G, H]."""
        self._kind, rank = head.kind, head.rank
        self._w1, self._w2 = torch.from_numpy(head.w1), torch.from_numpy(head.w2)
        self._state = torch.zeros(len(hiddens), rank)
        if head.projection is None or head.projection_bias is None:
            return
        projection, hidden_size = torch.from_numpy(head.projection), hiddens.shape[-1]
        is_gated = head.kind == MarkovKind.GATED
        of_hidden = projection[:, :hidden_size] if is_gated else projection[:, -hidden_size:]
        self._of_previous = projection[:, hidden_size:] if is_gated else projection[:, :-hidden_size]
        self._from_hidden = functional.linear(hiddens, of_hidden, torch.from_numpy(head.projection_bias))

    def embedding(self, previous_ids: npt.NDArray[np.integer[Any]]) -> Tensor:
        """W1[x], [B, r]. previous_ids [B], target ids."""
        return self._w1[torch.from_numpy(previous_ids.astype(np.int64))]

    def add(self, logits: Tensor, embedding: Tensor, slot: int) -> Tensor:
        """Logits of a slot [B, Vd] with the bias; moves the state on. Slots come in order."""
        return torch.addmm(logits, self._feature(embedding, slot), self._w2.T)

    def _feature(self, embedding: Tensor, slot: int) -> Tensor:
        """What W2 multiplies, [B, r]."""
        if self._kind == MarkovKind.VANILLA:
            return embedding
        from_hidden = self._from_hidden[:, slot]
        if self._kind == MarkovKind.GATED:
            return embedding * torch.sigmoid(from_hidden + embedding @ self._of_previous.T)
        joint = from_hidden + torch.cat((self._state, embedding), dim=1) @ self._of_previous.T
        gate, candidate, output = joint.chunk(3, dim=1)
        self._state = torch.lerp(torch.tanh(candidate), self._state, torch.sigmoid(gate))
        return torch.tanh(output)


def _weights(logits: FloatArray, temperature: float) -> npt.NDArray[np.float64]:
    """Unnormalised draft probabilities, 1 for the best token."""
    scaled: npt.NDArray[np.float64] = np.subtract(logits, logits.max(), dtype=np.float64)
    scaled /= temperature
    return np.exp(scaled, out=scaled)
