"""The sequential head against the golden rounds, in its three regimes, and the CPU form against the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from kernels.markov_sample import BlockDraft, ConfidenceHead, MarkovHead, MarkovKind, cpu, reference
from kernels.philox import Purpose, coupled_exponentials, uniforms
from kernels.sampling import Regime, SlotSampling

SampleBlock = Callable[..., BlockDraft]
IMPLEMENTATIONS = pytest.mark.parametrize(
    "sample_block", [reference.sample_block, cpu.sample_block], ids=["ref", "cpu"]
)
GOLDEN = Path(__file__).parents[1] / "golden"


def make_head(kind: MarkovKind, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> MarkovHead:
    rng = np.random.default_rng(rank)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.normal(0.0, 0.7, shape).astype(np.float32)

    shape = {
        MarkovKind.VANILLA: None,
        MarkovKind.GATED: (rank, hidden_size + rank),
        MarkovKind.RNN: (3 * rank, 2 * rank + hidden_size),
    }[kind]
    w1, w2 = normal(vocab_size, rank), normal(draft_vocab_size, rank)
    return MarkovHead(kind, w1, w2) if shape is None else MarkovHead(kind, w1, w2, normal(*shape), normal(shape[0]))


@IMPLEMENTATIONS
@pytest.mark.parametrize("kind", [MarkovKind.VANILLA, MarkovKind.RNN])
def test_golden_rounds(sample_block: SampleBlock, kind: MarkovKind) -> None:
    golden = load_file(GOLDEN / f"draft_{kind.value}" / "golden_inference.safetensors")
    weights = load_file(GOLDEN / f"draft_{kind.value}" / "model.safetensors")
    head = MarkovHead(
        kind,
        weights["markov_head.markov_w1.weight"],
        weights["markov_head.markov_w2.weight"],
        weights.get("markov_head.joint_proj.weight"),
        weights.get("markov_head.joint_proj.bias"),
    )
    confidence = ConfidenceHead(
        weights["confidence_head.proj.weight"], float(weights["confidence_head.proj.bias"].item())
    )
    anchor_ids = golden["anchor_0"]
    for i in range(3):
        draft_ids = golden[f"round{i}_draft_tokens"]
        inputs = [golden[f"round{i}_{name}"][np.newaxis].copy() for name in ("base_logits", "block_hidden")]
        args = (*inputs, head, confidence, anchor_ids.astype(np.uint32))
        where = (np.array([40]), np.array([1]), None)
        block = sample_block(*args, [SlotSampling(Regime.GREEDY)], *where, [None])
        assert block.token_ids.tolist() == [draft_ids.tolist()]
        np.testing.assert_allclose(block.confidence_logits[0], golden[f"round{i}_confidence_logits"], atol=1e-4)

        # At a temperature near 0 draws are the arg max too; their distributions hold the corrected logits.
        temperature, probs = 0.05, np.full((7, 512), np.nan, np.float32)
        block = sample_block(*args, [SlotSampling(Regime.REJECTION, temperature)], *where, [probs])
        same = np.cumprod(np.append(True, block.token_ids[0] == draft_ids)[:-1]).astype(bool)
        corrected = golden[f"round{i}_corrected_logits"]
        with np.errstate(divide="ignore"):
            logits = temperature * np.log(probs) + corrected.max(axis=1, keepdims=True)
        logits += temperature * -np.log(probs.max(axis=1, keepdims=True))
        is_normal = same[:, np.newaxis] & (probs > 1e-30)
        assert is_normal.any(axis=1).sum() >= 2
        np.testing.assert_allclose(logits[is_normal], corrected[is_normal], atol=1e-4)
        anchor_ids = golden[f"round{i}_next_anchor"]


@IMPLEMENTATIONS
def test_worked_example(sample_block: SampleBlock) -> None:
    """W1 selects the token before; W2 makes the successor of the target token x the draft index (x + 1) % 3."""
    draft_to_target = np.array([5, 0, 3], np.uint32)
    w1 = np.zeros((6, 3), np.float32)
    w1[draft_to_target] = np.eye(3)
    head = MarkovHead(MarkovKind.VANILLA, w1, np.roll(np.eye(3, dtype=np.float32), 1, axis=0))
    confidence = ConfidenceHead(np.array([[1, 10, 20, 30]], np.float32), 0.5)
    block = sample_block(
        np.zeros((2, 4, 3), np.float32),
        np.arange(8, dtype=np.float32).reshape(2, 4, 1),
        head,
        confidence,
        np.array([5, 1], np.uint32),  # token 1 has no embedding here: a tie, so the first draft index
        [SlotSampling(Regime.GREEDY)] * 2,
        np.array([3, 9]),
        np.array([1, 1]),
        draft_to_target,
        [None, None],
    )
    assert block.token_ids.dtype == np.uint32
    assert block.token_ids.tolist() == [[0, 3, 5, 0], [5, 0, 3, 5]]
    assert block.confidence_logits.tolist() == [[10.5, 21.5, 32.5, 13.5], [4.5, 15.5, 26.5, 37.5]]


def _random_args(
    kind: MarkovKind | None, regimes: list[Regime], sizes: tuple[int, int], num_slots: int = 4
) -> tuple[Any, Any]:
    """Arguments of sample_block for one row per regime, and draft distributions pre-filled with NaN."""
    vocab_size, draft_vocab_size = sizes
    rng, num_rows, hidden_size, rank = np.random.default_rng(draft_vocab_size), len(regimes), 7, 5
    draft_to_target = rng.permutation(vocab_size)[:draft_vocab_size].astype(np.uint32)
    args = (
        2.0 * rng.standard_normal((num_rows, num_slots, draft_vocab_size)).astype(np.float32),
        rng.standard_normal((num_rows, num_slots, hidden_size)).astype(np.float32),
        None if kind is None else make_head(kind, vocab_size, draft_vocab_size, rank, hidden_size),
        ConfidenceHead(rng.standard_normal((1, hidden_size + (0 if kind is None else rank))).astype(np.float32), 0.2),
        rng.integers(vocab_size, size=num_rows).astype(np.uint32),
        [SlotSampling(regime, 0.5 + 0.5 * i, key=2**64 - 1 - i) for i, regime in enumerate(regimes)],
        rng.integers(1000, size=num_rows),
        rng.integers(1000, size=num_rows),
        None if draft_vocab_size == vocab_size else draft_to_target,
    )
    shape = (num_slots + 2, draft_vocab_size)  # the arena may hold more slots than are drafted
    return args, [np.full(shape, np.nan, np.float32) if regime == Regime.REJECTION else None for regime in regimes]


@pytest.mark.parametrize("kind", [None, *MarkovKind])
@pytest.mark.parametrize("sizes", [(2, 1), (63, 63), (1000, 100), (1000, 1000)])
def test_cpu_equals_reference(kind: MarkovKind | None, sizes: tuple[int, int]) -> None:
    regimes = [*Regime, *Regime, Regime.REJECTION]
    args, probs = _random_args(kind, regimes, sizes)
    _, expected_probs = _random_args(kind, regimes, sizes)
    block, expected = cpu.sample_block(*args, probs), reference.sample_block(*args, expected_probs)
    assert np.array_equal(block.token_ids, expected.token_ids)
    np.testing.assert_allclose(block.confidence_logits, expected.confidence_logits, rtol=1e-4, atol=1e-5)
    for row, expected_row in zip(probs, expected_probs, strict=True):
        if row is not None:
            np.testing.assert_allclose(row, expected_row, rtol=1e-4, atol=1e-7)  # NaN beyond the drafted slots in both


@IMPLEMENTATIONS
def test_rejection_draws_from_the_probabilities_it_leaves(sample_block: SampleBlock) -> None:
    args, probs = _random_args(MarkovKind.VANILLA, [Regime.REJECTION] * 3, (100, 63))
    block = sample_block(*args, probs)
    sampling, positions, rounds, draft_to_target = args[5:]
    for b, k in np.ndindex(3, 4):
        mass_through = np.cumsum(probs[b][k], dtype=np.float64)
        assert abs(mass_through[-1] - 1.0) < 1e-5
        chance = uniforms(sampling[b].key, Purpose.DRAFT, int(positions[b]) + 1 + k, int(rounds[b]), 1)[0]
        index = np.searchsorted(mass_through, chance * mass_through[-1], side="right")
        assert block.token_ids[b, k] == draft_to_target[index]


@IMPLEMENTATIONS
def test_coupled_uses_the_noise_of_target_ids(sample_block: SampleBlock) -> None:
    args, probs = _random_args(None, [Regime.COUPLED] * 8, (100, 63))
    block = sample_block(*args, probs)
    base_logits, sampling, positions, draft_to_target = args[0], args[5], args[6], args[8]
    for b, k in np.ndindex(8, 4):
        exponentials = coupled_exponentials(sampling[b].key, int(positions[b]) + 1 + k, 100)[draft_to_target]
        index = np.argmax(base_logits[b, k] / sampling[b].temperature - np.log(exponentials))
        assert block.token_ids[b, k] == draft_to_target[index]


@IMPLEMENTATIONS
def test_tokens_of_probability_zero_are_never_drawn(sample_block: SampleBlock) -> None:
    base_logits = np.full((300, 1, 5), -np.inf, np.float32)
    base_logits[:, :, [1, 3]] = 0.0
    for regime in (Regime.COUPLED, Regime.REJECTION):
        block = sample_block(
            base_logits,
            np.zeros((300, 1, 1), np.float32),
            None,
            None,
            np.zeros(300, np.uint32),
            [SlotSampling(regime, key=key) for key in range(300)],
            np.zeros(300, np.int64),
            np.ones(300, np.int64),
            None,
            list(np.full((300, 1, 5), np.nan, np.float32)),
        )
        assert set(block.token_ids.ravel().tolist()) == {1, 3}
        assert np.isposinf(block.confidence_logits).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_slot_without_a_distribution_ends_the_window(sample_block: SampleBlock, bad: float) -> None:
    args, probs = _random_args(MarkovKind.RNN, list(Regime), (100, 63))
    good = sample_block(*args, [None if row is None else row.copy() for row in probs])
    args[0][:, 2, 40] = bad
    block = sample_block(*args, probs)
    assert np.array_equal(block.token_ids[:, :2], good.token_ids[:, :2])
    assert np.isnan(block.confidence_logits).tolist() == [[False, False, True, False]] * 3
    assert (block.token_ids[:, 2] == args[8][0]).all()
    assert probs[2][2].tolist() == [1.0] + [0.0] * 62


def test_rows_do_not_share_state() -> None:
    regimes = [Regime.GREEDY, Regime.COUPLED, Regime.GREEDY]
    args, probs = _random_args(MarkovKind.RNN, regimes, (1000, 100))
    together = cpu.sample_block(*args, probs)
    for b in range(3):
        base_logits, hidden, head, confidence, anchor_ids, sampling, positions, rounds, draft_to_target = args
        row = slice(b, b + 1)
        inputs = (base_logits[row], hidden[row], head, confidence, anchor_ids[row], sampling[row])
        alone = cpu.sample_block(*inputs, positions[row], rounds[row], draft_to_target, [None])
        assert np.array_equal(alone.token_ids[0], together.token_ids[b])


@pytest.mark.parametrize(
    ("kind", "projection"),
    [
        (MarkovKind.VANILLA, np.zeros((5, 12))),
        (MarkovKind.GATED, None),
        (MarkovKind.GATED, np.zeros((15, 17))),
        (MarkovKind.RNN, np.zeros((5, 12))),
    ],
)
def test_heads_of_the_wrong_shape_are_refused(kind: MarkovKind, projection: npt.NDArray[np.float64] | None) -> None:
    w1, w2 = np.zeros((9, 5), np.float32), np.zeros((4, 5), np.float32)
    bias = None if projection is None else np.zeros(len(projection), np.float32)
    with pytest.raises(ValueError, match="rank 5"):
        MarkovHead(kind, w1, w2, projection, bias)
    with pytest.raises(ValueError, match="rank 5"):
        MarkovHead(MarkovKind.VANILLA, w1, np.zeros((4, 6), np.float32))
