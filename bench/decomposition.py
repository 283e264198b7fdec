"""Where a mode's time a token goes: L = (T_draft + T_verify) / tau, and which part limits it.

A mode would be `1 + verified` times as fast as plain decoding if every verified draft were accepted and a round took no
longer than a plain step. What is missing of that is a product of factors: drafts not accepted, time of drafting, wider
verification, and time outside both calls. Their logarithms add up, so the largest is the lever.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Round(NamedTuple):
    """Means over the steps of a mode that have no prefill; times in milliseconds."""

    draft_ms: float
    """Draft call."""
    verify_ms: float
    """Step call."""
    other_ms: float
    """The rest of the step."""
    accepted_len: float
    """Tokens that a row commits a step: tau."""
    num_verified: float
    """Drafts that a row verifies a step."""

    @property
    def total_ms(self) -> float:
        """Of a step."""
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def token_ms(self) -> float:
        """L: time a token of one request."""
        return self.total_ms / self.accepted_len


class Lever(NamedTuple):
    """One factor of what is missing."""

    name: str
    loss: float
    """Logarithm of the factor, at least 0."""
    words: str


def find_levers(own: Round, plain: Round) -> list[Lever]:
    """What keeps `own`, which drafts, from its best, largest first; `plain`: the same requests without speculation."""
    whole = 1.0 + own.num_verified
    width_ms = max(0.0, own.verify_ms - plain.verify_ms)
    other_ms = max(0.0, own.other_ms - plain.other_ms)
    added_ms = max(own.draft_ms + width_ms + other_ms, 1e-9)
    time_loss = math.log(max(1.0, own.total_ms / plain.total_ms))

    def of_time(name: str, part_ms: float) -> Lever:
        return Lever(name, time_loss * part_ms / added_ms, f"{name}: {part_ms / own.total_ms:.0%} of a round")

    levers = [
        Lever(
            "acceptance",
            math.log(max(1.0, whole / own.accepted_len)),
            f"acceptance: {own.accepted_len:.2f} of {whole:.2f} tokens a round",
        ),
        of_time("drafting", own.draft_ms),
        of_time("verification width", width_ms),
        of_time("overhead", other_ms),
    ]
    return sorted(levers, key=lambda lever: -lever.loss)
