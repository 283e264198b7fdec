"""Budgets settled before drafting, spent by `kernels/verify_lens`: the windows are those of the rule itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_rounds import FreeCosts

from kernels.survivals import survivals
from kernels.verify_lens.cpu import verify_lens
from scheduler_service.policy import DraftedBatch, PolicyOptions, create_policy
from scheduler_service.policy.adaptive import AdaptivePolicy
from scheduler_service.policy.lagged import LaggedPolicy, OlderPolicy
from service_kit.errors import ConfigurationError

COSTS = FreeCosts((0, 1, 1.6, 2.2, 2.2, 2.2, *[2.8] * 3, *[3.4] * 4, *[4] * 9), context_ns=0.001)


def batches(seed: int, count: int) -> list[DraftedBatch]:
    """Steps of changing rows, block lengths, limits, weights and latency budgets; confidences in ties, some none."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        num_rows, num_slots = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        confidences = rng.random((num_rows, num_slots)).astype(np.float32)
        common = rng.random(confidences.shape) < 0.4
        confidences[common] = rng.choice(np.array([0, 0.5, 1, np.nan, 1.5], np.float32), common.sum())
        made.append(
            DraftedBatch(
                confidences,
                max_drafts=rng.integers(1, 6, num_rows),
                num_emitting=num_rows + 1,
                num_tokens=num_rows + 1,
                row_keys=rng.permutation(6)[:num_rows].tolist(),
                contexts=rng.integers(1, 99, num_rows),
                row_weights=rng.choice(np.array([1.0, 1.0, 0.5, 4.0]), num_rows),
                max_budget=int(rng.integers(0, 9)) if rng.random() < 0.3 else None,
            )
        )
    return made


def elsewhere(policy: OlderPolicy, batch: DraftedBatch) -> list[int] | None:
    """The windows of a step whose confidences the policy sees only afterwards; None if it needs them."""
    blank = replace(batch, confidences=np.full_like(batch.confidences, np.nan))
    policy.prepare(blank)
    budget = policy.budget(blank)
    if budget is None:
        return None
    lens = torch.zeros(len(batch.confidences), dtype=torch.int32)
    limits = torch.from_numpy(np.asarray(batch.max_drafts, np.int32))
    survival = torch.from_numpy(survivals(batch.confidences) * batch.weights[:, None])
    verify_lens(survival, limits, torch.tensor([budget]), lens)
    policy.spent(batch)
    return lens.tolist()


@pytest.mark.parametrize(("kind", "lag"), [(LaggedPolicy, 1), (LaggedPolicy, 2), (AdaptivePolicy, 1)])
def test_windows_are_those_of_the_rule(kind: type[OlderPolicy], lag: int) -> None:
    own, other = kind(COSTS, lag), kind(COSTS, lag, settles_budget=True)
    num_settled = 0
    for batch in batches(seed=lag, count=300):
        expected = own.windows(batch).verify_lens
        found = elsewhere(other, batch)
        num_settled += found is not None
        assert (other.windows(batch).verify_lens if found is None else found) == expected
    assert num_settled == 300 if kind is LaggedPolicy else 10 < num_settled < 290


def test_only_who_is_asked_to_settles_budgets() -> None:
    (batch,) = batches(seed=1, count=1)
    for mode, settles in (("compact", True), ("cap-accept", False), ("static", False), ("threshold", False)):
        policy = create_policy(mode, COSTS, PolicyOptions("lagged", settles_budget=True))
        assert policy is not None
        policy.prepare(batch)
        assert policy.settles_budget is settles
        assert (policy.budget(batch) is not None) is settles
    assert LaggedPolicy(COSTS).budget(batch) is None
    with pytest.raises(ConfigurationError, match="DSPARK_SCHEDULER_LOSSLESS_RULE to lagged"):
        PolicyOptions("causal", settles_budget=True)
