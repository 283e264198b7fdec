"""Made-up requests of a few classes, each with an accepted length of its own.

Draft k of a block survives with probability sigmoid(level − fall·(k − 1) + request + round + draft), given that those
before it did: `level` is the class's, the last three are normal, drawn once for each request, round and draft. The
confidence is that probability, so it is calibrated, unless `temperature` divides its logit: below 1 the drafter is too
sure of itself, above 1 not sure enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service_kit.errors import ConfigurationError
from simulator.population import Blocks, Floats, Ints, Population, RequestSizes, Stream

_FALL = 0.15
_REQUEST_SPREAD, _ROUND_SPREAD, _DRAFT_SPREAD = 0.6, 0.7, 1.8
_NUM_TUNING_ROUNDS = 20_000
_PROMPT_LENS, _ANSWER_LENS = (50, 450), (100, 400)

TRAFFIC: dict[str, dict[str, float]] = {
    # Accepted lengths published for DSpark on Qwen3-4B at temperature 1, block 7 (arXiv 2607.05147).
    "published": {"gsm8k": 6.11, "humaneval": 5.38, "mt-bench": 3.64, "arena-hard": 3.29},
    # Those of the embedded pair, greedy (docs/performance.md).
    "embedded": {
        "gsm8k": 2.33,
        "math500": 2.02,
        "humaneval": 1.72,
        "arena-hard": 1.59,
        "mt-bench": 1.58,
        "poetry": 1.53,
    },
}
"""Tokens committed per round of each class, when whole blocks are verified."""


@dataclass(frozen=True)
class SyntheticPopulation(Population):
    """Raises ConfigurationError for an accepted length that no block can have, or a temperature that is none."""

    accepted_lens: dict[str, float]
    """Of each class, the bonus token included."""
    block_size: int = 7
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, length in self.accepted_lens.items():
            if not 1.05 <= length <= self.block_size + 0.9:
                raise ConfigurationError(
                    f"class {name}: {length} tokens a round cannot come of blocks of {self.block_size}: give one from "
                    f"1.05 to {self.block_size + 0.9}"
                )
        if not self.temperature > 0:
            raise ConfigurationError(f"confidence temperature {self.temperature} must be positive, e.g. 1")

    @property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """In the order of ids."""
        return list(self.accepted_lens)

    @cached_property
    def levels(self) -> Floats:
        """[classes] logits that give the accepted lengths, found by bisection on one fixed sample."""
        dice = np.random.default_rng(0)
        noise = self.noise(dice, _REQUEST_SPREAD * dice.standard_normal(_NUM_TUNING_ROUNDS))
        wanted = list(self.accepted_lens.values())
        level: Floats = np.zeros(len(wanted))
        for halving in range(40):
            rates = _sigmoid(level[:, None, None] + noise)
            lens = 1 + np.cumprod(rates, axis=2).sum(axis=2).mean(axis=1)
            level += np.where(lens < wanted, 6.0, -6.0) / 2**halving
        return level

    def noise(self, dice: np.random.Generator, request_levels: Floats) -> Floats:
        """[rows, block] logits of a round of each row without the class's level."""
        shape = (request_levels.size, self.block_size)
        spread = _ROUND_SPREAD * dice.standard_normal((shape[0], 1)) + _DRAFT_SPREAD * dice.standard_normal(shape)
        fall = _FALL * np.arange(self.block_size, dtype=np.float64)
        logits: Floats = request_levels[:, None] + spread - fall
        return logits

    def stream(self, num_rows: int, seed: int) -> Stream:
        """See `Population`."""
        return _SyntheticStream(self, num_rows, seed)


class _SyntheticStream(Stream):
    def __init__(self, population: SyntheticPopulation, num_rows: int, seed: int) -> None:
        self._population = population
        self._requests, self._rounds = (np.random.default_rng([seed, kind]) for kind in range(2))
        self._levels = np.zeros(num_rows)
        self._num_started = 0

    def start(self, rows: Ints) -> RequestSizes:
        count = rows.size
        # One call for each request: the same numbers however many start together.
        draws = np.array([self._requests.standard_normal(1).tolist() + self._requests.random(2).tolist() for _ in rows])
        class_ids = (self._num_started + np.arange(count)) % len(self._population.levels)
        self._num_started += count
        self._levels[rows] = self._population.levels[class_ids] + _REQUEST_SPREAD * draws[:, 0]
        return RequestSizes(class_ids, _between(_PROMPT_LENS, draws[:, 1]), _between(_ANSWER_LENS, draws[:, 2]))

    def draft(self, rows: Ints) -> Blocks:
        logits = self._population.noise(self._rounds, self._levels[rows])
        is_accepted = self._rounds.random(logits.shape) < _sigmoid(logits)
        num_accepted = np.cumprod(is_accepted, axis=1).sum(axis=1)
        return Blocks(_sigmoid(logits / self._population.temperature).astype(np.float32), num_accepted)


def _between(bounds: tuple[int, int], share: Floats) -> Ints:
    return (bounds[0] + share * (bounds[1] - bounds[0])).astype(np.intp)


def _sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))
