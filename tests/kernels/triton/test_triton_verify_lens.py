"""Verify lengths on the device: the reference, and the scheduler's own rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.verify_lens.reference import verify_lens as reference
from kernels.verify_lens.triton import verify_lens
from scheduler_service.policy.survival import admission_order, lens_of, survivals, usable_lens


def blocks(num_rows: int, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Survivals [rows, slots] with many equal ones, and limits."""
    rng = np.random.default_rng(num_rows)
    confidences = rng.choice(np.array([0.0, 0.5, 0.5, 1.0, 1.0], np.float32), (num_rows, num_slots))
    confidences[0, 1] = np.nan
    limits = rng.integers(0, num_slots + 2, num_rows)
    return survivals(confidences, usable_lens(confidences, limits).lens), limits


@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, 2), (23, 7)])
def test_every_budget_chooses_as_the_scheduler_does(num_rows: int, num_slots: int) -> None:
    survival, limits = blocks(num_rows, num_slots)
    as_tensors = torch.from_numpy(survival), torch.from_numpy(limits.astype(np.int32))
    order, _ = admission_order(survival)
    for budget in (0, 1, num_rows // 2, num_rows, 3 * num_rows, num_rows * num_slots + 5):
        expected = lens_of(order[:budget], num_rows)
        for implementation in (reference, verify_lens):
            lens = torch.full((num_rows,), -7, dtype=torch.int32)
            implementation(*as_tensors, torch.tensor([budget]), lens)
            assert lens.tolist() == expected.tolist()


def test_rows_of_nobody_take_nothing_and_are_left_alone() -> None:
    survival = torch.tensor([[1.0, 0.9], [1.0, 1.0], [0.8, float("nan")]])
    for implementation in (reference, verify_lens):
        lens = torch.full((3,), -7, dtype=torch.int32)
        implementation(survival, torch.tensor([2, -1, 2], dtype=torch.int32), torch.tensor([9]), lens)
        assert lens.tolist() == [2, -7, 1]
