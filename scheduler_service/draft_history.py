"""What came of drafts: accepted lengths by position, older rounds fading, of every slot and of the engine. Pure
numbers.

A draft that was trimmed has no outcome; its confidence stands for it. So what a row is worth does not depend on how
much of it was verified beside whom. Everything here is history, so decisions that follow from it are lossless (design
5.1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

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
_FIRST_RATE, _FIRST_WEIGHT = 0.75, 2.0
"""Expected of every position before anything was seen: optimistic, since trying is what tells."""


class DraftedRounds(NamedTuple):
    """What came of the drafted rows of a step."""

    slots: Ints
    """[rows] at most one round a slot; -1 where the sequence has ended."""
    num_drafted: Ints
    """[rows] slots that could have been verified: a row's limit, if that is less than the block."""
    num_verified: Ints
    num_accepted: Ints
    """[rows] drafts committed."""
    confidences: npt.NDArray[np.float32]
    """[rows, drafts]: what those that were not verified were worth; not a number where that is not known."""


class DraftHistory:
    """What the next blocks are expected to bring when they are verified whole, and when rows may be probed."""

    def __init__(self, block_size: int) -> None:
        """Nothing seen."""
        self.block_size = block_size
        self._engine_hits, self._engine_rounds = np.zeros(block_size), np.zeros(block_size)
        self._slots = np.zeros(
            0,
            [
                # By position, faded: rounds that went past it, and rounds that came to it.
                ("hits", np.float64, (block_size,)),
                ("rounds", np.float64, (block_size,)),
                ("num_rounds", np.intp),
                ("last_drafted_at", np.intp),
                ("is_paying", np.bool_),
                ("next_probe_at", np.intp),
                ("probe_interval", np.intp),
            ],
        )

    def begin(self, slot: int, context_len: int) -> None:
        """A sequence of `context_len` tokens begins to decode in the slot: what others showed is expected of it."""
        if slot >= self._slots.size:
            self._slots = np.concatenate((self._slots, np.zeros(slot + 1, self._slots.dtype)))
        self._slots[slot] = 0
        self._slots["last_drafted_at"][slot] = context_len
        self._slots["probe_interval"][slot] = 1

    def add(self, rounds: DraftedRounds) -> None:
        """Takes in a step."""
        weights, successes = _outcomes(rounds, self.block_size)
        is_live = rounds.slots >= 0
        slots, weights, successes = rounds.slots[is_live], weights[is_live], successes[is_live]
        rows = self._slots[slots]
        is_teaching = rows["num_rounds"] < _NUM_TEACHING_ROUNDS
        if is_teaching.any():
            self._teach(weights[is_teaching], successes[is_teaching])
        kept = 1.0 - weights * (1.0 - _ROW_MEMORY)
        rows["hits"] = rows["hits"] * kept + weights * successes
        rows["rounds"] = rows["rounds"] * kept + weights
        rows["num_rounds"] += 1
        self._slots[slots] = rows

    def _teach(self, weights: Floats, successes: Floats) -> None:
        """Rounds that count for the engine, one after the other: each fades those before it."""
        fading = np.cumprod((1.0 - weights * (1.0 - _ENGINE_MEMORY))[::-1], axis=0)[::-1]
        later = np.concatenate((fading[1:], np.ones((1, self.block_size))))
        self._engine_hits = self._engine_hits * fading[0] + (weights * successes * later).sum(axis=0)
        self._engine_rounds = self._engine_rounds * fading[0] + (weights * later).sum(axis=0)

    def survivals(self, slots: Ints) -> Floats:
        """[rows, block] probability that each draft of the next block is accepted."""
        return self._survivals(slots, np.zeros(slots.size))

    def hoped_survivals(self, slots: Ints, context_lens: Ints) -> Floats:
        """[rows, block] survivals if the rows are better than they looked so far."""
        num_since = np.maximum(0, context_lens - self._slots["last_drafted_at"][slots])
        bit_lengths = np.frexp(num_since)[1].astype(np.float64)
        return self._survivals(slots, _OPTIMISM + _OPTIMISM_GROWTH * bit_lengths)

    def _survivals(self, slots: Ints, bonus: Floats) -> Floats:
        """`bonus`: [rows] successes granted."""
        prior = (self._engine_hits + _FIRST_WEIGHT * _FIRST_RATE) / (self._engine_rounds + _FIRST_WEIGHT)
        rows, granted = self._slots[slots], bonus[:, None]
        rates = (rows["hits"] + _PRIOR_WEIGHT * prior + granted) / (rows["rounds"] + _PRIOR_WEIGHT + granted)
        return np.cumprod(rates, axis=1, dtype=np.float64)

    def is_paying(self, slots: Ints) -> Bools:
        """[rows] whether each was last drafted because that pays."""
        paying: Bools = self._slots["is_paying"][slots]
        return paying

    def is_due(self, slots: Ints, context_lens: Ints) -> Bools:
        """[rows] whether each may be drafted to see whether that would pay."""
        due: Bools = context_lens >= self._slots["next_probe_at"][slots]
        return due

    def were_drafted(self, slots: Ints, context_lens: Ints, is_probe: Bools) -> None:
        """Rows are drafted. After a probe the next one is half as far off again."""
        rows = self._slots[slots]
        intervals = rows["probe_interval"]
        rows["last_drafted_at"] = context_lens
        rows["is_paying"] = ~is_probe
        rows["next_probe_at"] = np.where(is_probe, context_lens + intervals, rows["next_probe_at"])
        longer = np.minimum(intervals * 3 // 2 + 1, _MAX_PROBE_INTERVAL)
        rows["probe_interval"] = np.where(is_probe, longer, np.maximum(1, intervals // 2))
        self._slots[slots] = rows

    def were_left_out(self, slots: Ints) -> None:
        """Rows could have been drafted and are not."""
        self._slots["is_paying"][slots] = False


def _outcomes(rounds: DraftedRounds, block_size: int) -> tuple[Floats, Floats]:
    """[rows, block] probability that each position was reached, 0 where that teaches nothing, and what came of it."""
    positions = np.arange(block_size)
    confidences = np.full((rounds.slots.size, block_size), np.nan)
    confidences[:, : rounds.confidences.shape[1]] = rounds.confidences[:, :block_size]
    is_verified = positions < rounds.num_verified[:, None]
    is_known = is_verified | ((confidences >= 0.0) & (confidences <= 1.0))
    is_known &= positions < rounds.num_drafted[:, None]
    is_known = np.logical_and.accumulate(is_known, axis=1)
    successes = np.where(is_verified, positions < rounds.num_accepted[:, None], confidences)
    successes = np.where(is_known, successes, 0.0)
    reached = np.ones_like(successes)
    np.cumprod(successes[:, :-1], axis=1, out=reached[:, 1:])
    return np.where(is_known & (reached >= _LEAST_WEIGHT), reached, 0.0), successes
