"""What is compared: verify modes with the draft gate each would have in `serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.draft_gate import OpenGate
from scheduler_service.guard import Guard
from scheduler_service.policy import PolicyOptions, create_policy, needs_costs
from simulator.engine import Scheduling


class Mode(NamedTuple):
    """One line of the comparison."""

    name: str
    verify_mode: str
    options: PolicyOptions = PolicyOptions()
    has_guard: bool = False
    is_elastic: bool = True
    """Whether the guard may draft shorter blocks where the table has them."""

    def scheduling(self, model: CostModel, block_size: int, block_sizes: Sequence[int]) -> Scheduling | None:
        """`model`: what the scheduler believes steps to cost; `block_sizes`: those the drafter has been trained for."""
        if self.verify_mode == "off":
            return None
        costs = OnlineCosts(model) if needs_costs(self.verify_mode) else None
        policy = create_policy(self.verify_mode, costs, self.options)
        assert policy is not None
        if self.has_guard:
            return Scheduling(Guard(model, block_sizes if self.is_elastic else [block_size]), policy, costs)
        num_slots = self.options.fixed_window if self.verify_mode == "fixed" else block_size
        return Scheduling(OpenGate(num_slots), policy, costs)


def _mode(name: str, verify_mode: str, *, guard: bool = False, elastic: bool = True, **options: object) -> Mode:
    return Mode(name, verify_mode, PolicyOptions(**options), guard, elastic)  # type: ignore[arg-type]


MODES = {
    mode.name: mode
    for mode in (
        _mode("off", "off"),
        _mode("fixed-1", "fixed", fixed_window=1),
        _mode("fixed-2", "fixed", fixed_window=2),
        _mode("fixed-3", "fixed", fixed_window=3),
        _mode("static", "static"),
        _mode("threshold", "threshold"),
        _mode("compact", "compact", guard=True),
        _mode("compact-causal", "compact", guard=True, rule="causal"),
        _mode("compact-lagged", "compact", guard=True, rule="lagged"),
        _mode("compact-whole", "compact", guard=True, elastic=False),
        _mode("compact-no-guard", "compact"),
    )
}
"""By name. `-whole`: blocks are never shorter; `-no-guard`: every row is drafted in every step."""

BASELINES = ("off", "fixed-1", "fixed-2", "fixed-3", "static")
"""What compact must never be below."""
