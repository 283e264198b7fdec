"""Verify lengths on the CPU: the reference, and the scheduler's own rule; and survivals, as both sides compute them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import survivals as shared
from kernels.verify_lens import cpu, reference
from scheduler_service.policy.survival import admission_order, lens_of, survivals, usable_lens


@pytest.mark.parametrize("implementation", [cpu.verify_lens, reference.verify_lens])
def test_lengths_are_those_of_the_scheduler(implementation: object) -> None:
    """Random confidences, a third of them equal, some none at all; rows with limits; weights; every budget."""
    rng = np.random.default_rng(5)
    assert callable(implementation)
    for num_rows, num_slots in [(1, 1), (1, 7), (3, 2), (5, 4), (9, 7)]:
        confidences = rng.random((num_rows, num_slots)).astype(np.float32)
        common = rng.random(confidences.shape) < 0.5
        confidences[common] = rng.choice(np.array([0, 0.5, 1, np.nan, 1.5], np.float32), common.sum())
        limits = rng.integers(0, num_slots + 2, num_rows)
        weights = rng.choice(np.array([1.0, 1.0, 0.5, 3.0]), num_rows)
        own = survivals(confidences, usable_lens(confidences, limits).lens) * weights[:, None]
        order, _ = admission_order(own)
        given = torch.from_numpy(shared.survivals(confidences) * weights[:, None])
        for budget in range(num_rows * num_slots + 2):
            lens = torch.full((num_rows,), -7, dtype=torch.int32)
            implementation(given, torch.from_numpy(limits.astype(np.int32)), torch.tensor([budget]), lens)
            assert lens.tolist() == lens_of(order[:budget], num_rows).tolist()


@pytest.mark.parametrize("implementation", [cpu.verify_lens, reference.verify_lens])
def test_rows_of_nobody_take_nothing_and_are_left_alone(implementation: object) -> None:
    assert callable(implementation)
    survival = torch.tensor([[1.0, 0.9], [1.0, 1.0], [0.8, float("nan")]])
    lens = torch.full((3,), -7, dtype=torch.int32)
    implementation(survival, torch.tensor([2, -1, 2], dtype=torch.int32), torch.tensor([9]), lens)
    assert lens.tolist() == [2, -7, 1]


def test_survivals_end_at_the_first_confidence_that_is_none() -> None:
    confidences = np.array([[0.5, 1.0, 0.5], [np.nan, 1.0, 1.0], [1.0, -0.1, 1.0]], np.float32)
    assert shared.survivals(confidences).tolist() == [[0.5, 0.5, 0.25], [0, 0, 0], [1, 0, 0]]
    odds = np.array([[3.0, 1.0, 3.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    corrected = shared.corrected(confidences, odds)
    np.testing.assert_array_equal(corrected[0], np.float32([0.75, 1.0, 0.75]))
    assert np.isnan(corrected[1, 0])
    assert corrected[1, 1] == 1.0
