"""Target distributions: worked examples of each filter, and the CPU form against the reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kernels.sampling import Regime, SlotSampling
from kernels.target_probs import InvalidRowError, cpu, reference

TargetProbs = Callable[[npt.NDArray[np.float32], SlotSampling], npt.NDArray[np.float64]]
IMPLEMENTATIONS = pytest.mark.parametrize(
    "target_probs", [reference.target_probs, cpu.target_probs], ids=["ref", "cpu"]
)
HALVES = np.log(np.array([[0.125, 0.5, 0.25, 0.0625, 0.0625]], np.float32))


def sampling(**settings: float) -> SlotSampling:
    return SlotSampling(Regime.REJECTION, **settings)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.125, 0.5, 0.25, 0.0625, 0.0625]),
        ({"temperature": 0.5}, np.array([4, 64, 16, 1, 1]) / 86),
        ({"top_k": 2}, [0, 2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 4}, np.array([2, 8, 4, 1, 0]) / 15),  # equal logits: the lower id stays
        ({"top_k": 99}, [0.125, 0.5, 0.25, 0.0625, 0.0625]),
        ({"top_p": 0.51}, [0, 2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.49}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.0}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.3}, [0, 2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 2 / 3, 1 / 3, 0, 0]),  # top-p of what top-k left: 4/7 + 2/7 >= 0.8
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.2}, np.array([1, 4, 2, 0, 0]) / 7),
    ],
)
def test_worked_examples(target_probs: TargetProbs, settings: dict[str, float], expected: npt.ArrayLike) -> None:
    np.testing.assert_allclose(target_probs(HALVES, sampling(**settings))[0], expected, rtol=1e-6, atol=0)


@IMPLEMENTATIONS
def test_zeros_of_both_signs_are_equal_logits(target_probs: TargetProbs) -> None:
    logits = np.array([[-0.0, 0.0, -9.0, 0.0]], np.float32)
    assert target_probs(logits, sampling(top_k=2)).tolist() == [[0.5, 0.5, 0, 0]]


@IMPLEMENTATIONS
def test_greedy_is_a_point_mass_on_the_lowest_best_id(target_probs: TargetProbs) -> None:
    logits = np.array([[0, 3, -1, 3], [2, 2, 2, 2]], np.float32)
    assert target_probs(logits, SlotSampling(Regime.GREEDY)).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_masked_tokens_have_no_mass(target_probs: TargetProbs, settings: dict[str, float]) -> None:
    logits = np.array([[-np.inf, 1, -np.inf, 1, -np.inf]], np.float32)
    assert target_probs(logits, sampling(**settings)).tolist() == [[0, 0.5, 0, 0.5, 0]]


@IMPLEMENTATIONS
@pytest.mark.parametrize("bad", [[0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("regime", Regime)
def test_rows_without_a_distribution_are_errors(target_probs: TargetProbs, bad: list[float], regime: Regime) -> None:
    with pytest.raises(InvalidRowError, match="logits"):
        target_probs(np.array([[0, 1], bad], np.float32), SlotSampling(regime))


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 100, 1000, 49152])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.01},
        {"top_k": 1},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 2.0},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
        {"top_p": 0.95, "min_p": 0.02},
    ],
)
def test_cpu_equals_reference(vocab_size: int, settings: dict[str, float]) -> None:
    logits = (3.0 * np.random.default_rng(vocab_size).standard_normal((3, vocab_size))).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equal logits, zeros of both signs
    logits[2, vocab_size // 2] = -np.inf if vocab_size > 1 else 0.0
    probs, expected = (module.target_probs(logits, sampling(**settings)) for module in (cpu, reference))
    assert probs.dtype == np.float64
    assert np.array_equal(probs > 0.0, expected > 0.0)
    np.testing.assert_allclose(probs, expected, rtol=1e-12, atol=0)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=1e-12)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    for settings in ({}, {"top_p": 0.9}, {"top_k": 9}):
        together = cpu.target_probs(logits, sampling(**settings))
        alone = np.concatenate([cpu.target_probs(row[np.newaxis], sampling(**settings)) for row in logits])
        assert np.array_equal(together, alone)
