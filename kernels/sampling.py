"""What a sampling kernel needs to know about a row: plain values, no wire types."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Regime(enum.IntEnum):
    """How a request's tokens are chosen; the numbers are those of the wire."""

    GREEDY = 1
    COUPLED = 2
    REJECTION = 3


@dataclass(frozen=True)
class SlotSampling:
    """Sampling constants of a slot. Neutral values leave the distribution as the target gives it."""

    regime: Regime
    temperature: float = 1.0
    """> 0 unless greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """1 keeps all."""
    min_p: float = 0.0
    """0 keeps all."""
    key: int = 0
    """64-bit key of the request's random streams; the seed for coupled slots."""

    @property
    def is_filtered(self) -> bool:
        """Whether any of top-k, top-p, min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
