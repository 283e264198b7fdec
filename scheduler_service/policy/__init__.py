"""Verify policies by verify mode. `off` has none: nothing is drafted, so there is nothing to choose."""

from __future__ import annotations

from scheduler_service.cost_table import CostTable
from scheduler_service.policy.base import DraftedBatch, VerifyPolicy
from scheduler_service.policy.compact import CompactPolicy
from scheduler_service.policy.static import StaticPolicy
from service_kit.errors import ConfigurationError

__all__ = ["DraftedBatch", "VerifyPolicy", "create_policy"]


def create_policy(verify_mode: str, costs: CostTable | None) -> VerifyPolicy | None:
    """The policy of a mode; None for `off`. Raises ConfigurationError for `compact` without a cost table."""
    if verify_mode == "off":
        return None
    if verify_mode == "static":
        return StaticPolicy()
    if costs is None:
        raise ConfigurationError("verify_mode compact needs a cost table: use static or off without one")
    return CompactPolicy(costs)
