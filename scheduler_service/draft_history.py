"""What came of a row's drafts: accepted lengths by position, older rounds fading. Pure numbers.

A draft that was trimmed has no outcome; its confidence stands for it. So what a row is worth does not depend on how
much of it was verified beside whom. Everything here is history, so decisions that follow from it are lossless (design
5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

_ROW_MEMORY = 0.9
"""Weight that a row's counts keep from round to round: some ten rounds count."""
_ENGINE_MEMORY = 0.99
_PRIOR_WEIGHT = 3.0
"""Rounds of its own that a row's estimate needs until they weigh as much as what others showed."""
_OPTIMISM = 1.5
_OPTIMISM_GROWTH = 0.5
"""Further successes that a hopeful estimate grants, and how many more each time the row has gone twice as far without a
draft: in the end everything is worth another try."""
_NUM_TEACHING_ROUNDS = 4
"""First rounds of a row that shape what is expected of others: a row that drafts long must not drown the rest."""
_MAX_PROBE_INTERVAL = 512
_LEAST_WEIGHT = 0.02
"""Probability of being reached from which on a trimmed position teaches nothing."""
_FIRST_RATE = 0.75
"""Expected of every position before anything was seen: optimistic, since trying is what tells."""


class _Rates:
    """Faded counts by position: rounds that came to it, and rounds that went past it."""

    def __init__(self, block_size: int, memory: float) -> None:
        self._memory = memory
        self.hits, self.rounds = [0.0] * block_size, [0.0] * block_size

    def add(self, num_drafted: int, num_verified: int, num_accepted: int, confidences: Sequence[float]) -> None:
        """A round of `num_drafted` positions."""
        weight = 1.0  # probability that the position was reached
        for position in range(num_drafted):
            if position < num_verified:
                success = float(position < num_accepted)
            elif position < len(confidences) and 0.0 <= confidences[position] <= 1.0:
                success = confidences[position]
            else:
                return
            kept = 1.0 - weight * (1.0 - self._memory)
            self.hits[position] = self.hits[position] * kept + weight * success
            self.rounds[position] = self.rounds[position] * kept + weight
            weight *= success
            if weight < _LEAST_WEIGHT:
                return

    def of(self, priors: list[float], weight: float, bonus: float = 0.0) -> list[float]:
        """Rate of each position; `priors` count as `weight` rounds, `bonus` is added successes."""
        return [
            (hits + weight * prior + bonus) / (rounds + weight + bonus)
            for hits, rounds, prior in zip(self.hits, self.rounds, priors, strict=True)
        ]


@dataclass(frozen=True)
class Expectation:
    """What a row's block is expected to bring when it is verified whole."""

    survivals: list[float]
    """[block_size] probability that each draft is accepted."""
    accepted: list[float]
    """[block_size + 1] drafts accepted by slots drafted."""


def expectation_of(rates: list[float]) -> Expectation:
    """From the rate of each position."""
    survivals = list(accumulate(rates, mul))
    return Expectation(survivals, list(accumulate(survivals, initial=0.0)))


class EngineHistory:
    """What is expected of a row that has shown nothing yet."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._accepted = _Rates(block_size, _ENGINE_MEMORY)
        self._update()

    def _update(self) -> None:
        self.accepted_rates = self._accepted.of([_FIRST_RATE] * self.block_size, 2.0)
        self.expectation = expectation_of(self.accepted_rates)

    def add(self, num_drafted: int, num_verified: int, num_accepted: int, confidences: Sequence[float]) -> None:
        """A round of any row."""
        self._accepted.add(num_drafted, num_verified, num_accepted, confidences)
        self._update()


@dataclass
class RowHistory:
    """One sequence's rounds, and when it may be probed. Made by `Guard.new_history`."""

    engine: EngineHistory
    last_drafted_at: int
    """Context length when it was last drafted; to begin with, when it began to decode."""
    num_rounds: int = 0
    is_paying: bool = False
    """Whether it was last drafted because that pays."""
    next_probe_at: int = 0
    """Context length from which it may be drafted to see whether that would pay."""
    _probe_interval: int = 1
    _own: Expectation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._accepted = _Rates(self.engine.block_size, _ROW_MEMORY)

    @property
    def expectation(self) -> Expectation:
        """What its next block is expected to bring."""
        return self._own or self.engine.expectation

    def add(self, num_drafted: int, num_verified: int, num_accepted: int, confidences: Sequence[float] = ()) -> None:
        """Takes in a round."""
        if self.num_rounds < _NUM_TEACHING_ROUNDS:
            self.engine.add(num_drafted, num_verified, num_accepted, confidences)
        self.num_rounds += 1
        self._accepted.add(num_drafted, num_verified, num_accepted, confidences)
        self._own = expectation_of(self._accepted.of(self.engine.accepted_rates, _PRIOR_WEIGHT))

    def hoped_survivals(self, context_len: int) -> list[float]:
        """[block_size] survivals if the row is better than it looked so far."""
        bonus = _OPTIMISM + _OPTIMISM_GROWTH * max(0, context_len - self.last_drafted_at).bit_length()
        return expectation_of(self._accepted.of(self.engine.accepted_rates, _PRIOR_WEIGHT, bonus)).survivals

    def was_drafted(self, context_len: int, *, is_probe: bool) -> None:
        """It was drafted at `context_len`. After a probe the next one is half as far off again."""
        self.last_drafted_at = context_len
        self.is_paying = not is_probe
        if is_probe:
            self.next_probe_at = context_len + self._probe_interval
            self._probe_interval = min(self._probe_interval * 3 // 2 + 1, _MAX_PROBE_INTERVAL)
        else:
            self._probe_interval = max(1, self._probe_interval // 2)
