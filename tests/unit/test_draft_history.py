"""Histories of all slots at once are those of each row counted one round after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler_service.draft_history import DraftedRounds, DraftHistory

BLOCK, NUM_SLOTS = 5, 4


class OneByOne:
    """Faded counts by position, as the definition says."""

    def __init__(self, memory: float) -> None:
        self.memory, self.hits, self.rounds = memory, [0.0] * BLOCK, [0.0] * BLOCK

    def add(self, num_drafted: int, num_verified: int, num_accepted: int, confidences: list[float]) -> None:
        reached = 1.0
        for position in range(num_drafted):
            if position < num_verified:
                success = float(position < num_accepted)
            elif position < len(confidences) and 0.0 <= confidences[position] <= 1.0:
                success = confidences[position]
            else:
                return
            kept = 1.0 - reached * (1.0 - self.memory)
            self.hits[position] = self.hits[position] * kept + reached * success
            self.rounds[position] = self.rounds[position] * kept + reached
            reached *= success
            if reached < 0.02:
                return

    def survivals(self, priors: list[float], weight: float, bonus: float = 0.0) -> list[float]:
        rates = [
            (hits + weight * prior + bonus) / (rounds + weight + bonus)
            for hits, rounds, prior in zip(self.hits, self.rounds, priors, strict=True)
        ]
        return [math.prod(rates[: position + 1]) for position in range(BLOCK)]

    def rates(self, priors: list[float], weight: float) -> list[float]:
        return [
            (hits + weight * prior) / (rounds + weight)
            for hits, rounds, prior in zip(self.hits, self.rounds, priors, strict=True)
        ]


@pytest.mark.parametrize("seed", range(4))
def test_as_counted_one_by_one(seed: int) -> None:
    dice = np.random.default_rng(seed)
    history, engine = DraftHistory(BLOCK), OneByOne(0.99)
    rows = [OneByOne(0.9) for _ in range(NUM_SLOTS)]
    num_rounds = [0] * NUM_SLOTS
    for slot in range(NUM_SLOTS):
        history.begin(slot, 10)
    for step in range(60):
        slots = dice.permutation(NUM_SLOTS)[: dice.integers(0, NUM_SLOTS + 1)]
        count, num_confidences = slots.size, int(dice.integers(0, BLOCK + 1))
        drafted, verified = dice.integers(1, BLOCK + 1, count), dice.integers(0, BLOCK + 1, count)
        verified = np.minimum(verified, drafted)
        accepted = dice.integers(0, verified + 1)
        confidences = dice.uniform(-0.1, 1.3, (count, num_confidences)).astype(np.float32)
        confidences[dice.random(confidences.shape) < 0.1] = np.nan
        is_live = dice.random(count) < 0.9
        history.add(DraftedRounds(np.where(is_live, slots, -1), drafted, verified, accepted, confidences))
        for index in np.flatnonzero(is_live):
            slot, outcome = slots[index], (int(drafted[index]), int(verified[index]), int(accepted[index]))
            if num_rounds[slot] < 4:
                engine.add(*outcome, confidences[index].tolist())
            num_rounds[slot] += 1
            rows[slot].add(*outcome, confidences[index].tolist())
        if step == 30:  # another sequence takes a slot
            history.begin(2, 25)
            rows[2], num_rounds[2] = OneByOne(0.9), 0
        asked = dice.permutation(NUM_SLOTS)
        priors = engine.rates([0.75] * BLOCK, 2.0)
        expected = [rows[slot].survivals(priors, 3.0) for slot in asked]
        assert history.survivals(asked) == pytest.approx(np.array(expected))
        lens = dice.integers(10, 200, NUM_SLOTS)
        began = [25 if slot == 2 and step >= 30 else 10 for slot in asked]
        bonuses = [1.5 + 0.5 * max(0, int(n) - m).bit_length() for n, m in zip(lens, began, strict=True)]
        hoped = [rows[slot].survivals(priors, 3.0, bonus) for slot, bonus in zip(asked, bonuses, strict=True)]
        assert history.hoped_survivals(asked, lens) == pytest.approx(np.array(hoped))


def test_probes_become_rarer_until_drafting_pays() -> None:
    history, slots = DraftHistory(BLOCK), np.array([3, 1])
    for slot in slots.tolist():
        history.begin(slot, 10)
    assert history.is_due(slots, np.array([10, 10])).all()
    gaps, at = [], 10
    for _ in range(20):
        history.were_drafted(slots, np.array([at, at]), np.array([True, False]))
        assert history.is_paying(slots).tolist() == [False, True]
        gap = next(more for more in range(1000) if history.is_due(slots, np.array([at + more] * 2))[0])
        gaps.append(gap)
        at += gap
    assert gaps[:5] == [1, 2, 4, 7, 11]
    assert gaps[-1] == 512
    history.were_drafted(slots, np.array([at, at]), np.array([False, False]))
    history.were_left_out(slots[1:])
    assert history.is_paying(slots).tolist() == [True, False]
    history.were_drafted(slots, np.array([at, at]), np.array([True, False]))
    assert history.is_due(slots, np.array([at + 255, at])).tolist() == [False, True]
    assert history.is_due(slots, np.array([at + 256, at])).tolist() == [True, True]
