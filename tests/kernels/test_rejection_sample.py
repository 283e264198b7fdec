"""Acceptance of one row: exact cases of the three regimes, bad rows, and the CPU form against the reference.

That the emitted text follows the target's distribution is tests/unit/test_acceptance_distribution.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kernels.philox import Purpose, coupled_exponentials, uniforms
from kernels.rejection_sample import AskedToken, InvalidRowError, RowOutcome, cpu, reference
from kernels.sampling import Regime, SlotSampling
from kernels.target_probs.reference import target_probs

AcceptRow = Callable[..., RowOutcome]
IMPLEMENTATIONS = pytest.mark.parametrize("accept_row", [reference.accept_row, cpu.accept_row], ids=["ref", "cpu"])
GREEDY, REJECTION = SlotSampling(Regime.GREEDY), SlotSampling(Regime.REJECTION, key=5)
POSITION, ROUND = 40, 3


def ids(*token_ids: int) -> npt.NDArray[np.uint32]:
    return np.array(token_ids, np.uint32)


def log(*rows: list[float]) -> npt.NDArray[np.float32]:
    """Logits whose softmax is `rows`."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float32))


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([], RowOutcome(0, [2])),
        ([2, 0], RowOutcome(2, [2, 0, 3])),
        ([2, 1], RowOutcome(1, [2, 0])),
        ([0, 0], RowOutcome(0, [2])),
        ([2, 2], RowOutcome(1, [2, 0])),  # 0 and 2 tie in row 1: the lower id is the arg max
    ],
)
def test_greedy(accept_row: AcceptRow, drafts: list[int], expected: RowOutcome) -> None:
    logits = np.array([[0, 1, 5, 4], [7, 1, 7, 0], [0, 0, 0, 1]], np.float32)[: len(drafts) + 1]
    outcome = accept_row(logits, ids(*drafts), None, None, GREEDY, POSITION, ROUND)
    assert outcome == expected
    assert all(type(token_id) is int for token_id in outcome.token_ids)


@IMPLEMENTATIONS
def test_rows_after_the_first_rejection_are_not_read(accept_row: AcceptRow) -> None:
    logits = np.array([[0, 1], [np.nan, np.nan]], np.float32)
    assert accept_row(logits, ids(0), None, None, GREEDY, POSITION, ROUND) == RowOutcome(0, [1])


@IMPLEMENTATIONS
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_k": 3}])
def test_coupled_accepts_what_the_target_would_sample(accept_row: AcceptRow, settings: dict[str, float]) -> None:
    vocab_size, num_drafts = 63, 3
    logits = np.random.default_rng(0).standard_normal((num_drafts + 1, vocab_size)).astype(np.float32)
    for key in range(30):
        sampling = SlotSampling(Regime.COUPLED, key=key, **settings)
        probs = target_probs(logits, sampling)
        own = [
            int(np.argmax(row / coupled_exponentials(key, POSITION + 1 + k, vocab_size))) for k, row in enumerate(probs)
        ]
        accepted_len = key % (num_drafts + 1)
        drafts = [own[k] if k < accepted_len else (own[k] + 1) % vocab_size for k in range(num_drafts)]
        for round_ in (1, 9):
            outcome = accept_row(logits, ids(*drafts), None, None, sampling, POSITION, round_)
            assert outcome == RowOutcome(accepted_len, own[: accepted_len + 1])


@IMPLEMENTATIONS
@pytest.mark.parametrize("draft_mass", [1.0, 4.0])
def test_rejection_uses_the_noise_of_the_judged_position_and_round(accept_row: AcceptRow, draft_mass: float) -> None:
    target, draft = [0.2, 0.3, 0.5], draft_mass * np.array([[0.6, 0.2, 0.2]] * 2, np.float32)
    for key in range(200):
        sampling = SlotSampling(Regime.REJECTION, key=key)
        outcome = accept_row(log(target, target, target), ids(0, 0), draft, None, sampling, POSITION, ROUND)
        num_accepted = 0
        while num_accepted < 2:
            chance = uniforms(key, Purpose.ACCEPT, POSITION + 1 + num_accepted, ROUND, 1)[0]
            if chance >= 0.2 / 0.6:
                break
            num_accepted += 1
        purpose, mass = (Purpose.BONUS, target) if num_accepted == 2 else (Purpose.RESIDUAL, [0.0, 0.25, 0.75])
        chance = uniforms(key, purpose, POSITION + 1 + num_accepted, ROUND, 1)[0]
        last = int(np.searchsorted(np.cumsum(mass), chance, side="right"))
        assert outcome == RowOutcome(num_accepted, [*[0] * num_accepted, last])


@IMPLEMENTATIONS
def test_drafts_at_least_as_likely_under_the_target_always_survive(accept_row: AcceptRow) -> None:
    logits, draft = log([0.5, 0.5, 0], [0.1, 0.1, 0.8]), np.array([[0.5, 0.25, 0.25]], np.float32)
    for key in range(100):
        for drafted in (0, 1):
            outcome = accept_row(
                logits, ids(drafted), draft, None, SlotSampling(Regime.REJECTION, key=key), POSITION, ROUND
            )
            assert outcome.accepted_len == 1


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("draft_probs", "draft_to_target"),
    [
        (None, None),
        (np.array([[0.0, 0.5, 0.5]], np.float32), None),
        (np.array([[1.0]], np.float32), ids(2)),  # the draft's token is outside the draft vocabulary
        (np.array([[0.5, 0.0]], np.float32), ids(2, 0)),
    ],
)
def test_a_draft_its_distribution_cannot_have_made_is_a_point_mass(
    accept_row: AcceptRow,
    draft_probs: npt.NDArray[np.float32] | None,
    draft_to_target: npt.NDArray[np.uint32] | None,
) -> None:
    """Accepted with the target's probability, else the target without it: the target again (chi-square, 1e-4)."""
    target = np.array([0.3, 0.3, 0.4])
    outcomes = [
        accept_row(
            log(list(target), [1, 0, 0]),
            ids(0),
            draft_probs,
            draft_to_target,
            SlotSampling(Regime.REJECTION, key=key),
            POSITION,
            ROUND,
        )
        for key in range(2000)
    ]
    counts = np.bincount([outcome.token_ids[0] for outcome in outcomes], minlength=3)
    assert ((counts - 2000 * target) ** 2 / (2000 * target)).sum() < 18.42
    assert all((outcome.accepted_len == 1) == (outcome.token_ids[0] == 0) for outcome in outcomes)


@IMPLEMENTATIONS
def test_a_masked_draft_is_rejected_and_never_returned(accept_row: AcceptRow) -> None:
    logits, draft = log([0.0, 0.5, 0.5], [1, 0, 0]), np.array([[0.9, 0.05, 0.05]], np.float32)
    for key in range(50):
        outcome = accept_row(logits, ids(0), draft, None, SlotSampling(Regime.REJECTION, key=key), POSITION, ROUND)
        assert outcome.accepted_len == 0
        assert outcome.token_ids[0] in (1, 2)


@IMPLEMENTATIONS
@pytest.mark.parametrize("scale", [1.0, 1.0 - 1e-7, 1.0 + 1e-7, 3.0])
def test_equal_distributions_accept_nearly_always_and_never_fail(accept_row: AcceptRow, scale: float) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 1000)).astype(np.float32)
    probs = target_probs(logits[:1], REJECTION)
    draft = (probs * scale).astype(np.float32)  # whatever it sums to, it is that much of a distribution
    outcomes = [
        accept_row(logits, ids(key), draft, None, SlotSampling(Regime.REJECTION, key=key), POSITION, ROUND)
        for key in range(200)
    ]
    assert sum(outcome.accepted_len for outcome in outcomes) == 200


@IMPLEMENTATIONS
@pytest.mark.parametrize("regime", Regime)
def test_bad_rows_are_errors_of_that_row(accept_row: AcceptRow, regime: Regime) -> None:
    sampling, draft = SlotSampling(regime), np.full((1, 3), 1 / 3, np.float32)
    good = np.zeros((2, 3), np.float32)
    for bad in (np.nan, np.inf):
        logits = good.copy()
        logits[0, 1] = bad
        with pytest.raises(InvalidRowError, match="logits"):
            accept_row(logits, ids(0), draft, None, sampling, POSITION, ROUND)
    with pytest.raises(InvalidRowError, match="3"):
        accept_row(good, ids(3), draft, None, sampling, POSITION, ROUND)


@IMPLEMENTATIONS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
def test_bad_draft_probabilities_are_errors(accept_row: AcceptRow, bad: float) -> None:
    draft = np.array([[0.5, 0.5, bad]], np.float32)
    with pytest.raises(InvalidRowError, match="draft probabilities"):
        accept_row(np.zeros((2, 3), np.float32), ids(0), draft, None, REJECTION, POSITION, ROUND)


@pytest.mark.parametrize("regime", Regime)
@pytest.mark.parametrize("vocab_size", [2, 63, 100, 1000])
def test_cpu_equals_reference(vocab_size: int, regime: Regime) -> None:
    rng = np.random.default_rng(vocab_size)
    for round_ in range(60):
        num_drafts = round_ % 5
        draft_vocab_size = int(rng.integers(1, vocab_size + 1))
        draft_to_target = rng.permutation(vocab_size)[:draft_vocab_size].astype(np.uint32) if round_ % 3 else None
        draft_ids = rng.integers(vocab_size, size=num_drafts).astype(np.uint32)
        logits = 2.0 * rng.standard_normal((num_drafts + 1, vocab_size)).astype(np.float32)
        logits[np.arange(num_drafts), draft_ids] += rng.choice([0.0, 8.0])  # so that long windows survive too
        draft_probs = rng.dirichlet(np.ones(draft_vocab_size), num_drafts).astype(np.float32)
        sampling = SlotSampling(
            regime,
            temperature=float(rng.choice([0.5, 1.0, 2.0])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
            key=int(rng.integers(2**63)),
        )
        asked = [AskedToken(int(rng.integers(num_drafts + 1)), int(rng.integers(vocab_size))) for _ in range(3)]
        args = (logits, draft_ids, draft_probs, draft_to_target, sampling, POSITION, round_, asked)
        outcome, expected = cpu.accept_row(*args), reference.accept_row(*args)
        assert outcome[:2] == expected[:2]
        assert outcome.asked_probs == pytest.approx(expected.asked_probs, abs=1e-12, nan_ok=True)
        probs = target_probs(logits, sampling)
        for ask, answer in zip(asked, outcome.asked_probs, strict=True):
            is_emitted = regime == Regime.REJECTION and ask.row <= outcome.accepted_len
            truth = float(probs[ask.row, ask.token_id]) if is_emitted else np.nan
            assert answer == pytest.approx(truth, abs=1e-12, nan_ok=True)
