"""The sequential head on a device: G dependent slots, each a few launches over all rows, no value read back.

What does not depend on drafted tokens comes first, for all slots at once: the hidden state's part of the projection
and of the confidence. Then, slot by slot: the feature (rnn and gated heads after one or two small products), the logits
of all rows in one product with W2, their tiles (`kernels.triton.tiles`), the probabilities of rejection rows where the
verifier will read them, and the draw, whose token the next slot reads from device memory.

Equality with the reference: the uniforms are the same bits, and a rejection row draws from the very numbers that it
leaves in draft_probs. Greedy and coupled drafts are the same unless two logits or scores lie within rounding (1e-5 with
float32 weights); with bfloat16 weights W2's input is rounded to bfloat16 as a bfloat16 engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from kernels.markov_sample import BlockDraft, ConfidenceHead, MarkovHead, MarkovKind
from kernels.sampling import Regime, SlotSampling
from kernels.triton.markov_head import (
    GATED,
    RNN,
    VANILLA,
    draft_probs_kernel,
    draft_token_kernel,
    feature_kernel,
    linear,
)
from kernels.triton.rows import NOBODY, SamplingRows
from kernels.triton.tiles import BLOCK_VOCAB, tile_picks, tile_stats

FloatArray = npt.NDArray[np.float32]
_KINDS = {MarkovKind.VANILLA: VANILLA, MarkovKind.GATED: GATED, MarkovKind.RNN: RNN}


class HeadTensors(NamedTuple):
    """`MarkovHead` on a device."""

    kind: MarkovKind
    w1: Tensor
    """[V, r]"""
    w2: Tensor
    """[Vd, r]"""
    of_hidden: Tensor | None = None
    """[outputs, H], outputs r (gated) or 3r (rnn): the projection's part for the hidden state."""
    of_embedding: Tensor | None = None
    """[outputs, r]"""
    of_state: Tensor | None = None
    """[3r, r], rnn only."""
    bias: Tensor | None = None
    """[outputs]"""

    @classmethod
    def of(
        cls, head: MarkovHead, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> HeadTensors:
        """The weights of `head`."""

        def put(array: FloatArray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        if head.projection is None or head.projection_bias is None:
            return cls(head.kind, put(head.w1), put(head.w2))
        rank, projection = head.rank, head.projection
        if head.kind == MarkovKind.GATED:
            of_state, of_embedding, of_hidden = None, projection[:, -rank:], projection[:, :-rank]
        else:
            of_state, of_embedding, of_hidden = np.split(projection, (rank, 2 * rank), axis=1)
        return cls(
            head.kind,
            put(head.w1),
            put(head.w2),
            put(of_hidden),
            put(of_embedding),
            None if of_state is None else put(of_state),
            put(head.projection_bias),
        )


class ConfidenceTensors(NamedTuple):
    """`ConfidenceHead` on a device."""

    of_hidden: Tensor
    """[1, H]"""
    of_embedding: Tensor | None
    """[r], None if it sees the hidden state alone."""
    bias: Tensor
    """[1] float32"""

    @classmethod
    def of(
        cls,
        head: ConfidenceHead,
        hidden_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> ConfidenceTensors:
        """The weights of `head`."""
        weight = torch.from_numpy(head.weight).to(device, dtype)
        seen = weight[0, hidden_size:].contiguous()
        bias = torch.tensor([head.bias], device=device)
        return cls(weight[:, :hidden_size].contiguous(), seen if seen.numel() else None, bias)


class Blocks(NamedTuple):
    """What is written of B rows' blocks of G slots; rows of nobody are left alone."""

    token_ids: Tensor
    """[B, G] int32 target ids."""
    confidence_logits: Tensor
    """[B, G] float32, uncalibrated; +inf throughout without a confidence head."""
    probs: Tensor
    """[slots, at least G, Vd] float32: draft distributions of rejection rows."""
    probs_slots: Tensor
    """[B] int32: each rejection row's place in `probs`."""


def sample_blocks(
    base_logits: Tensor,
    hidden: Tensor,
    head: HeadTensors | None,
    confidence: ConfidenceTensors | None,
    anchor_ids: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    rounds: Tensor,
    draft_to_target: Tensor | None,
    blocks: Blocks,
    block_vocab: int = BLOCK_VOCAB,
) -> None:
    """Draws G drafts for each of B rows.

    Args: base_logits [B, G, Vd] and hidden [B, G, H] after the final norm, float32 or bfloat16; anchor_ids [B] int32
    target ids; rows, of which NOBODY's are skipped; positions [B] int64 of the anchors; rounds [B] int64;
    draft_to_target [Vd] int32, None for the identity.
    """
    num_rows, num_slots, num_tokens = base_logits.shape
    identity = torch.arange(num_rows, dtype=torch.int32, device=base_logits.device)
    previous = torch.where(rows.regimes == NOBODY, 0, anchor_ids)
    confidences = _confidences(hidden, confidence)
    joint = _joint_of_hidden(hidden, head)
    rank = 0 if head is None else head.w1.shape[1]
    state, feature = (base_logits.new_zeros(num_rows, rank, dtype=torch.float32) for _ in range(2))
    logits = base_logits.new_empty(num_rows, num_tokens, dtype=torch.float32)
    masses = None
    for slot in range(num_slots):
        if head is None:
            logits = base_logits[:, slot]
        else:
            own_joint = joint[:, slot]
            if head.of_state is not None:
                linear(state, head.of_state, own_joint, own_joint)
            if head.of_embedding is not None:
                linear(head.w1, head.of_embedding, own_joint, own_joint, previous)
            seen = None if confidence is None else confidence.of_embedding
            feature_kernel[(num_rows,)](
                rows.regimes, previous, head.w1, head.w1.stride(0), joint[:, slot], joint.stride(0), state, feature,
                feature if seen is None else seen, confidences, confidences.stride(0), slot, rank,
                KIND=_KINDS[head.kind].value, SEES_PREVIOUS=seen is not None, RANK=triton.next_power_of_2(rank),
            )  # fmt: skip
            linear(feature, head.w2, base_logits[:, slot], logits)
        stats = tile_stats(logits, identity, rows, block_vocab)
        picks = tile_picks(logits, identity, identity, rows, positions, 1 + slot, draft_to_target, None, block_vocab)
        num_tiles = stats.best.shape[1]
        max_tiles = triton.next_power_of_2(num_tiles)
        if masses is None:
            masses = logits.new_empty(num_rows, num_tiles, dtype=torch.float64)
        probs = blocks.probs[:, slot]
        draft_probs_kernel[num_rows, num_tiles](
            logits, logits.stride(0), rows.regimes, rows.temperatures, *stats, probs, probs.stride(0),
            blocks.probs_slots, masses, num_tokens, num_tiles,
            MAX_TILES=max_tiles, BLOCK_VOCAB=block_vocab, num_warps=8,
        )  # fmt: skip
        draft_token_kernel[(num_rows,)](
            rows.regimes, rows.temperatures, rows.keys, positions, rounds, *stats, *picks, probs, probs.stride(0),
            blocks.probs_slots, masses, identity if draft_to_target is None else draft_to_target,
            previous, blocks.token_ids, blocks.token_ids.stride(0), confidences, confidences.stride(0),
            slot, num_tokens, num_tiles,
            HAS_TARGET_IDS=draft_to_target is not None, MAX_TILES=max_tiles, BLOCK_VOCAB=block_vocab, num_warps=8,
        )  # fmt: skip
    is_somebody = (rows.regimes != NOBODY)[:, None]
    blocks.confidence_logits.copy_(torch.where(is_somebody, confidences, blocks.confidence_logits))


def _confidences(hidden: Tensor, confidence: ConfidenceTensors | None) -> Tensor:
    """The hidden state's part of every confidence logit, [B, G] float32."""
    num_rows, num_slots, hidden_size = hidden.shape
    if confidence is None:
        return torch.full((num_rows, num_slots), torch.inf, device=hidden.device)
    out = hidden.new_empty(num_rows * num_slots, 1, dtype=torch.float32)
    linear(hidden.reshape(-1, hidden_size), confidence.of_hidden, confidence.bias, out)
    return out.view(num_rows, num_slots)


def _joint_of_hidden(hidden: Tensor, head: HeadTensors | None) -> Tensor:
    """The hidden state's part of the head's projection, [B, G, outputs] float32; no outputs where it has none."""
    num_rows, num_slots, hidden_size = hidden.shape
    if head is None or head.of_hidden is None or head.bias is None:
        return hidden.new_empty(num_rows, num_slots, 0, dtype=torch.float32)
    out = hidden.new_empty(num_rows * num_slots, len(head.of_hidden), dtype=torch.float32)
    linear(hidden.reshape(-1, hidden_size), head.of_hidden, head.bias, out)
    return out.view(num_rows, num_slots, -1)


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
    num_rows, num_slots, num_tokens = base_logits.shape
    blocks = Blocks(
        torch.empty(num_rows, num_slots, dtype=torch.int32),
        torch.empty(num_rows, num_slots),
        torch.empty(num_rows, num_slots, num_tokens),
        torch.arange(num_rows, dtype=torch.int32),
    )
    sample_blocks(
        torch.from_numpy(base_logits),
        torch.from_numpy(hidden),
        None if head is None else HeadTensors.of(head),
        None if confidence is None else ConfidenceTensors.of(confidence, hidden.shape[-1]),
        torch.from_numpy(anchor_ids.astype(np.int32)),
        SamplingRows.of(sampling),
        torch.from_numpy(positions),
        torch.from_numpy(rounds),
        None if draft_to_target is None else torch.from_numpy(draft_to_target.astype(np.int32)),
        blocks,
    )
    for row, probs, out in zip(sampling, blocks.probs.numpy(), draft_probs_out, strict=True):
        if row.regime == Regime.REJECTION and out is not None:
            out[:num_slots] = probs
    return BlockDraft(blocks.token_ids.numpy().astype(np.uint32), blocks.confidence_logits.numpy())
