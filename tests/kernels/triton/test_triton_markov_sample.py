"""Drafted blocks on the device, against the reference."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.markov_sample import ConfidenceHead, MarkovHead, MarkovKind
from kernels.markov_sample.reference import sample_block as reference
from kernels.markov_sample.triton import Blocks, ConfidenceTensors, HeadTensors, sample_block, sample_blocks
from kernels.philox import Purpose, uniforms
from kernels.rejection_sample.triton import DraftDistributions, WindowOutcomes, Windows, accept_rows
from kernels.sampling import Regime, SlotSampling
from kernels.triton.rows import NOBODY, SamplingRows

VOCAB, DRAFT_VOCAB, HIDDEN, RANK, SLOTS, BLOCK = 100, 63, 12, 5, 3, 64
SAMPLINGS = [
    SlotSampling(Regime.GREEDY),
    SlotSampling(Regime.COUPLED, temperature=0.9, key=2**64 - 1),
    SlotSampling(Regime.REJECTION, temperature=0.7, key=4),
]


def make_head(kind: MarkovKind, rng: np.random.Generator) -> MarkovHead:
    num_outputs = {MarkovKind.VANILLA: 0, MarkovKind.GATED: RANK, MarkovKind.RNN: 3 * RANK}[kind]
    num_inputs = HIDDEN + (2 * RANK if kind == MarkovKind.RNN else RANK)
    return MarkovHead(
        kind,
        rng.standard_normal((VOCAB, RANK)),
        rng.standard_normal((DRAFT_VOCAB, RANK)),
        rng.standard_normal((num_outputs, num_inputs)) if num_outputs else None,
        rng.standard_normal(num_outputs) if num_outputs else None,
    )


def inputs(rng: np.random.Generator, num_rows: int = len(SAMPLINGS)) -> tuple[np.ndarray, ...]:
    """base_logits, hidden, anchor_ids, positions, rounds and draft_to_target."""
    return (
        rng.standard_normal((num_rows, SLOTS, DRAFT_VOCAB)).astype(np.float32),
        rng.standard_normal((num_rows, SLOTS, HIDDEN)).astype(np.float32),
        rng.integers(0, VOCAB, num_rows).astype(np.uint32),
        rng.integers(0, 2**33, num_rows),
        rng.integers(0, 2**33, num_rows),
        rng.permutation(VOCAB)[:DRAFT_VOCAB].astype(np.uint32),
    )


@pytest.mark.parametrize("kind", [None, *MarkovKind])
def test_block_against_the_reference(kind: MarkovKind | None) -> None:
    rng = np.random.default_rng(1)
    head = None if kind is None else make_head(kind, rng)
    seen = HIDDEN + (RANK if kind in (MarkovKind.VANILLA, MarkovKind.RNN) else 0)
    confidence = ConfidenceHead(rng.standard_normal((1, seen)), 0.3)
    base_logits, hidden, anchor_ids, positions, rounds, draft_to_target = inputs(rng)
    if kind == MarkovKind.VANILLA:
        base_logits[0, 1, 7], base_logits[1, 2], base_logits[2, 1, 3] = math.nan, -math.inf, math.inf
    own_map = None if kind == MarkovKind.GATED else draft_to_target
    outs = [[None, None, np.full((SLOTS + 1, DRAFT_VOCAB), math.nan, np.float32)] for _ in range(2)]
    common = (base_logits, hidden, head, confidence, anchor_ids, SAMPLINGS, positions, rounds, own_map)
    expected, block = reference(*common, outs[0]), sample_block(*common, outs[1])
    np.testing.assert_array_equal(block.token_ids, expected.token_ids)
    np.testing.assert_allclose(block.confidence_logits, expected.confidence_logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outs[1][2], outs[0][2], rtol=1e-4)
    assert np.isnan(outs[1][2][SLOTS]).all()


def test_a_rejection_draft_is_drawn_from_what_is_written() -> None:
    rng = np.random.default_rng(2)
    num_rows = 5
    base_logits, hidden, anchor_ids, positions, rounds, _ = inputs(rng, num_rows)
    samplings = [SlotSampling(Regime.REJECTION, key=key) for key in range(num_rows)]
    probs = [np.full((SLOTS, DRAFT_VOCAB), math.nan, np.float32) for _ in samplings]
    block = sample_block(base_logits, hidden, None, None, anchor_ids, samplings, positions, rounds, None, probs)
    assert np.isposinf(block.confidence_logits).all()
    for row in range(num_rows):
        for slot in range(SLOTS):
            through = np.cumsum(probs[row][slot], dtype=np.float64)
            chance = uniforms(row, Purpose.DRAFT, int(positions[row]) + 1 + slot, int(rounds[row]), 1)[0]
            assert block.token_ids[row, slot] == np.searchsorted(through, chance * through[-1], side="right")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_nobody_are_left_alone_and_change_nothing(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    head = HeadTensors.of(make_head(MarkovKind.RNN, rng), dtype=dtype)
    confidence = ConfidenceTensors.of(ConfidenceHead(rng.standard_normal((1, HIDDEN + RANK))), HIDDEN, dtype=dtype)
    base_logits, hidden, anchor_ids, positions, rounds, draft_to_target = (
        torch.from_numpy(each.astype(np.int32) if each.dtype == np.uint32 else each) for each in inputs(rng)
    )
    base_logits, hidden = base_logits.to(dtype), hidden.to(dtype)

    def draw(places: list[int], nobody: int | None = None) -> Blocks:
        rows = SamplingRows.of([SAMPLINGS[place] for place in places])
        blocks = Blocks(
            torch.full((len(places), SLOTS), -7, dtype=torch.int32),
            torch.full((len(places), SLOTS), -7.0),
            torch.full((2, SLOTS, DRAFT_VOCAB), math.nan),
            torch.ones(len(places), dtype=torch.int32),
        )
        anchors, own_hidden = anchor_ids[places], hidden[places]
        if nobody is not None:
            rows.regimes[nobody], anchors[nobody], own_hidden[nobody] = NOBODY, 2**31 - 1, math.nan
        sample_blocks(
            base_logits[places], own_hidden, head, confidence, anchors, rows, positions[places], rounds[places],
            draft_to_target, blocks, BLOCK,
        )  # fmt: skip
        return blocks

    together = draw([0, 1, 2, 1], nobody=3)
    assert (together.token_ids[3] == -7).all()
    assert (together.confidence_logits[3] == -7).all()
    assert together.probs[0].isnan().all()
    alone = draw([2])
    assert torch.equal(alone.token_ids[0], together.token_ids[2])
    assert torch.equal(alone.confidence_logits[0], together.confidence_logits[2])
    assert torch.equal(alone.probs[1], together.probs[1])


def test_distributions_beyond_2_to_31_elements(tmp_path: Path) -> None:
    """In a sparse file, of which only what is written takes memory."""
    rng, stride = np.random.default_rng(4), 2**29
    base_logits, hidden, anchor_ids, positions, rounds, _ = (torch.from_numpy(each.copy()) for each in inputs(rng, 1))
    path, slot, shape = tmp_path / "probs", 5, (6, SLOTS, DRAFT_VOCAB)
    path.touch()
    os.truncate(path, 4 * (slot * stride + SLOTS * DRAFT_VOCAB))
    arena = torch.from_file(str(path), shared=True, size=slot * stride + SLOTS * DRAFT_VOCAB)
    far, near = arena.as_strided(shape, (stride, DRAFT_VOCAB, 1)), torch.full(shape, math.nan)
    for probs in (far, near):
        blocks = Blocks(
            torch.empty(1, SLOTS, dtype=torch.int32), torch.empty(1, SLOTS), probs, torch.tensor([slot]).int()
        )
        rows = SamplingRows.of(SAMPLINGS[2:])
        sample_blocks(base_logits, hidden, None, None, anchor_ids.int(), rows, positions, rounds, None, blocks, BLOCK)
    assert torch.equal(far[slot], near[slot])
    logits = torch.from_numpy(rng.standard_normal((SLOTS + 1, DRAFT_VOCAB)).astype(np.float32))
    zeros, slots = torch.zeros(SLOTS + 1).int(), torch.tensor([slot]).int()
    windows = Windows(zeros, zeros[:1], torch.tensor([SLOTS]).int(), blocks.token_ids, positions, rounds)
    outcomes = [
        WindowOutcomes(torch.zeros(1).int(), torch.zeros(1, SLOTS + 1).int(), torch.zeros(1).int()) for _ in range(2)
    ]
    for probs, outcome in zip((far, near), outcomes, strict=True):
        accept_rows(logits, windows, rows, DraftDistributions(probs, slots), outcome, None, BLOCK)
    assert [each.tolist() for each in outcomes[0]] == [each.tolist() for each in outcomes[1]]
    assert outcomes[0].statuses.item() == 0
