"""Verify policies by verify mode. `off` has none: nothing is drafted, so there is nothing to choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from scheduler_service.policy.adaptive import AdaptivePolicy
from scheduler_service.policy.base import DraftedBatch, StepCosts, StepWork, VerifyPolicy, Windows
from scheduler_service.policy.cap_accept import CapAcceptPolicy, CommitCut, commit_cut
from scheduler_service.policy.causal import CausalPolicy
from scheduler_service.policy.lagged import LaggedPolicy
from scheduler_service.policy.static import StaticPolicy
from scheduler_service.policy.threshold import ThresholdPolicy
from service_kit.errors import ConfigurationError

__all__ = [
    "CommitCut",
    "DraftedBatch",
    "PolicyOptions",
    "StepCosts",
    "StepWork",
    "VerifyPolicy",
    "Windows",
    "commit_cut",
    "create_policy",
    "needs_costs",
    "trims_by_confidence",
]


@dataclass(frozen=True)
class PolicyOptions:
    """What the modes can be told. Raises ConfigurationError for a value that no mode can use."""

    rule: Literal["adaptive", "causal", "lagged"] = "adaptive"
    """The lossless rule of `compact` and `cap-accept`."""
    budget_lag: int = 1
    """Steps between the confidences that set the lagged rule's budget and the step that spends it."""
    fixed_window: int = 1
    """Drafts verified of each row in `fixed`."""
    threshold: float = 0.5
    """Smallest confidence verified in `threshold`."""
    settles_budget: bool = False
    """Whether the verifier may choose the windows of `compact` in steps of the lagged rule (`VerifyPolicy.budget`)."""

    def __post_init__(self) -> None:
        if self.rule not in ("adaptive", "causal", "lagged"):
            raise ConfigurationError(f"rule {self.rule!r} is not known: use adaptive, causal or lagged")
        if self.budget_lag < 1:
            raise ConfigurationError(
                f"budget_lag {self.budget_lag} would set a step's budget by the drafts it is spent on, which changes "
                "the text's distribution: use 1, or 2 when steps are chained"
            )
        if self.settles_budget and self.rule == "causal":
            raise ConfigurationError(
                "verify_lens_on_device is for the lagged rule, and the causal one never uses it: set "
                "DSPARK_SCHEDULER_LOSSLESS_RULE to lagged or adaptive, or DSPARK_SCHEDULER_VERIFY_LENS_ON_DEVICE to "
                "false",
                field="verify_lens_on_device",
            )
        if self.fixed_window < 0:
            raise ConfigurationError(f"fixed_window {self.fixed_window} must be a number of drafts, e.g. 2")
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigurationError(f"threshold {self.threshold} must be a probability, e.g. 0.5")


def needs_costs(verify_mode: str) -> bool:
    """Whether a mode schedules by what steps cost."""
    return verify_mode in ("compact", "cap-accept")


def trims_by_confidence(verify_mode: str) -> bool:
    """Whether what a mode verifies depends on confidences; else the fate of all it verifies is a fair sample."""
    return verify_mode in ("compact", "threshold")


def create_policy(
    verify_mode: str, costs: StepCosts | None, options: PolicyOptions | None = None
) -> VerifyPolicy | None:
    """The policy of a mode; None for `off`. Raises ConfigurationError for an unknown mode, and for `compact` and
    `cap-accept` without costs."""
    options = options or PolicyOptions()
    makers: dict[str, Callable[[], VerifyPolicy | None]] = {
        "off": lambda: None,
        "static": StaticPolicy,
        "fixed": lambda: StaticPolicy(options.fixed_window),
        "threshold": lambda: ThresholdPolicy(options.threshold),
        "compact": lambda: _scheduled(verify_mode, costs, options),
        "cap-accept": lambda: CapAcceptPolicy(_scheduled(verify_mode, costs, replace(options, settles_budget=False))),
    }
    if verify_mode not in makers:
        raise ConfigurationError(f"verify_mode {verify_mode!r} is not known: use one of {', '.join(makers)}")
    return makers[verify_mode]()


def _scheduled(verify_mode: str, costs: StepCosts | None, options: PolicyOptions) -> VerifyPolicy:
    if costs is None:
        raise ConfigurationError(f"verify_mode {verify_mode} needs measured costs: use static or off without them")
    if options.rule == "causal":
        return CausalPolicy(costs)
    kind = LaggedPolicy if options.rule == "lagged" else AdaptivePolicy
    return kind(costs, options.budget_lag, settles_budget=options.settles_budget)
