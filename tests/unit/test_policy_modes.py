"""The other verify modes, and which policy a mode gets."""

from __future__ import annotations

import numpy as np
import pytest
from exact_rounds import FreeCosts

from scheduler_service.cost_model import CostModel
from scheduler_service.policy import DraftedBatch, PolicyOptions, VerifyPolicy, commit_cut, create_policy
from scheduler_service.policy.adaptive import AdaptivePolicy
from scheduler_service.policy.cap_accept import CapAcceptPolicy
from scheduler_service.policy.lagged import LaggedPolicy
from scheduler_service.policy.static import StaticPolicy
from scheduler_service.policy.threshold import ThresholdPolicy
from service_kit.errors import ConfigurationError

NAN = float("nan")
_CONFIDENCES = np.array([[0.9, 0.4, 0.9, 0.9], [0.5, 0.5, NAN, 0.9], [0.2, 0.9, 0.9, 0.9]], np.float32)


def _batch(*limits: int) -> DraftedBatch:
    return DraftedBatch(_CONFIDENCES, limits, 3, 3)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (StaticPolicy(), [4, 2, 1]),
        (StaticPolicy(2), [2, 2, 1]),
        (StaticPolicy(0), [0, 0, 0]),
        (ThresholdPolicy(0.5), [1, 2, 0]),
        (ThresholdPolicy(0.2), [4, 2, 1]),  # 0.2 as the drafter sends it, in float32
        (ThresholdPolicy(0.0), [4, 2, 1]),
        (ThresholdPolicy(1.0), [0, 0, 0]),
    ],
)
def test_windows(policy: VerifyPolicy, expected: list[int]) -> None:
    windows = policy.windows(_batch(4, 4, 1))
    assert windows.verify_lens == windows.commit_lens == expected
    assert windows.num_invalid == 1
    assert policy.windows(_batch(4, 4, 1)).verify_lens == expected


def test_cap_accept_verifies_whole_blocks_and_commits_the_schedule() -> None:
    windows = CapAcceptPolicy(ThresholdPolicy(0.5)).windows(_batch(4, 4, 1))
    assert windows.verify_lens == [4, 2, 1]
    assert windows.commit_lens == [1, 2, 0]
    assert windows.num_invalid == 1


def test_cap_accept_schedules_as_the_lagged_rule_alone_does() -> None:
    costs = FreeCosts((0, 1, 2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4))
    alone, wrapped = LaggedPolicy(costs), CapAcceptPolicy(LaggedPolicy(costs))
    generator = np.random.default_rng(3)
    for _ in range(20):
        confidences = generator.random((3, 4)).astype(np.float32)
        batch = DraftedBatch(confidences, [4, 4, 4], 3, 3, row_keys="abc")
        assert wrapped.windows(batch).commit_lens == alone.windows(batch).verify_lens


@pytest.mark.parametrize(
    ("num_accepted", "token_ids", "commit_len", "expected"),
    [
        (3, [1, 2, 3, 4], 3, (3, [1, 2, 3, 4])),
        (3, [1, 2, 3, 4], 1, (1, [1, 2])),  # draft 2 stands in for the bonus
        (1, [1, 9], 1, (1, [1, 9])),  # so does what replaced it
        (0, [9], 2, (0, [9])),
        (2, [1, 2, 9], 0, (0, [1])),
    ],
)
def test_commit_cut(num_accepted: int, token_ids: list[int], commit_len: int, expected: tuple[int, list[int]]) -> None:
    assert commit_cut(num_accepted, token_ids, commit_len) == expected


def test_modes() -> None:
    costs = FreeCosts((1.0,) * 20)
    kinds = {"static": StaticPolicy, "fixed": StaticPolicy, "threshold": ThresholdPolicy, "compact": AdaptivePolicy}
    for mode, kind in {**kinds, "cap-accept": CapAcceptPolicy}.items():
        assert type(create_policy(mode, costs)) is kind
    assert create_policy("off", None) is None
    assert type(create_policy("compact", costs, PolicyOptions(rule="lagged", budget_lag=2))) is LaggedPolicy
    fixed = create_policy("fixed", None, PolicyOptions(fixed_window=2))
    assert fixed is not None
    assert fixed.windows(_batch(4, 4, 4)).verify_lens == [2, 2, 2]


def test_a_cost_model_is_the_costs_of_a_policy() -> None:
    model = CostModel(10.0, 0.0, 0.0, np.array([0, 0, 5, 10, 15, 20.0]), {4: np.array([0, 90.0])})
    policy = create_policy("compact", model)
    assert policy is not None
    batch = DraftedBatch(np.full((1, 4), 0.9, np.float32), [4], num_emitting=1, num_tokens=1)
    assert policy.windows(batch).verify_lens == [4]  # drafting is paid for, so rows are relatively cheap


@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_a_schedule_needs_costs(mode: str) -> None:
    with pytest.raises(ConfigurationError, match=f"verify_mode {mode} needs measured costs"):
        create_policy(mode, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "global"}, "use adaptive, causal or lagged"),
        ({"budget_lag": 0}, "budget_lag 0 .* use 1"),
        ({"fixed_window": -1}, "fixed_window -1"),
        ({"threshold": 1.5}, "threshold 1.5"),
        ({"threshold": NAN}, "threshold nan"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PolicyOptions(**options)  # type: ignore[arg-type]


def test_an_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="use one of off, static, fixed, threshold, compact, cap-accept"):
        create_policy("fast", None)
