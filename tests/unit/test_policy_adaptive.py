"""The adaptive rule: causal where costs are smooth, lagged where older confidences look across a jump."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from exact_rounds import FreeCosts

from scheduler_service.policy import DraftedBatch, VerifyPolicy
from scheduler_service.policy.adaptive import AdaptivePolicy
from scheduler_service.policy.cap_accept import CapAcceptPolicy
from scheduler_service.policy.causal import CausalPolicy
from scheduler_service.policy.lagged import LaggedPolicy

# Verifying anything doubles the step; then up to 3 drafts are free, and any more doubles it again.
_JUMPS = FreeCosts((0, 1, 2, 2, 2, 4, 4, 4, 4))
_SMOOTH = FreeCosts((0, 1, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8, 3.1))
_SURE, _UNSURE = (0.95, 0.95, 0.95), (0.2, 0.2, 0.2)


def _lens(policy: VerifyPolicy, *blocks: Sequence[float], max_budget: int | None = None) -> list[list[int]]:
    """Windows of one row's blocks, one a step."""
    batches = (
        DraftedBatch(np.array([block], np.float32), [3], 1, 1, row_keys=["a"], max_budget=max_budget)
        for block in blocks
    )
    return [policy.windows(batch).verify_lens for batch in batches]


def test_jumps_are_crossed_when_older_confidences_say_so() -> None:
    blocks = _SURE, _SURE, _UNSURE, _SURE, _SURE
    assert _lens(AdaptivePolicy(_JUMPS), *blocks) == _lens(LaggedPolicy(_JUMPS), *blocks) == [[3], [3], [3], [0], [3]]


def test_where_costs_are_smooth_current_confidences_decide() -> None:
    blocks = _SURE, _UNSURE, _SURE, _UNSURE
    assert _lens(AdaptivePolicy(_SMOOTH), *blocks) == _lens(CausalPolicy(_SMOOTH), *blocks) == [[3], [0], [3], [0]]
    assert _lens(LaggedPolicy(_SMOOTH), *blocks) == [[3], [3], [0], [3]]


@pytest.mark.parametrize("costs", [_JUMPS, _SMOOTH])
def test_a_budget_caps_both(costs: FreeCosts) -> None:
    assert _lens(AdaptivePolicy(costs), _SURE, _SURE, max_budget=2) == [[2], [2]]


def test_preparing_without_confidences_changes_nothing() -> None:
    makers = (LaggedPolicy, AdaptivePolicy, lambda costs: CapAcceptPolicy(LaggedPolicy(costs)))
    for seed, make in itertools.product(range(10), makers):
        dice = np.random.default_rng(seed)
        costs = FreeCosts(tuple(np.cumsum(dice.exponential(size=20) * dice.integers(0, 2, 20)) + 1.0))
        plain, prepared = make(costs), make(costs)
        for _ in range(12):
            count, slots = int(dice.integers(1, 4)), int(dice.integers(1, 4))
            batch = DraftedBatch(
                dice.random((count, slots)).astype(np.float32) ** 0.3,
                dice.integers(0, slots + 1, count),
                count,
                count,
                row_keys=dice.permutation(4)[:count].tolist(),
                row_weights=dice.choice([1.0, 3.0], count),
            )
            for _ in range(dice.integers(0, 3)):  # not at all, or once more after the drafter failed
                prepared.prepare(replace(batch, confidences=np.zeros((count, slots), np.float32)))
            assert prepared.windows(batch) == plain.windows(batch)
