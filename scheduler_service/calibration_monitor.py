"""Calibration while serving: how far confidences are from what happens, and a slow correction of them.

What counts is what nobody has selected. A trimmed draft is unobserved, not rejected: counting it as rejected makes
every drafter look over-confident, leaving it out makes the rest look better than the whole, because windows end where
confidences are low. So the estimates stand on

- audited rounds (`audit.py`): a fair sample of all drafted rounds, in which the fate of every position is known;
- rounds of modes that verify whole blocks, or the same number of drafts of each, whatever the confidences: for the
  positions that those verify.

Rounds whose windows were scheduled are left out. What they verified is observed without bias *given* everything known
when it was chosen, but it is chosen for high confidences: it tells nothing of the others, and a correction fitted to it
would follow the window's edge, which the correction moves.

Every number here comes from committed rounds, so what follows from it is history (design 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.sampling import Regime
from scheduler_service.step_record import RowRound, StepObserver, StepRecord

Floats = npt.NDArray[np.float64]

NUM_BINS = 15
"""Of survivals, of equal width on [0, 1]: as in `dspark calibrate`."""
_MEMORY = 0.9995
"""Weight that counts keep from round to round: some 2,000 rounds count."""
_PRIOR = 25.0
"""Information that stands for "no correction": that of a hundred even bets."""
_MAX_SHIFT = 2.0
"""Largest correction, in logits: beyond it, the file is for another drafter."""


class CalibrationError(NamedTuple):
    """Of one regime and position."""

    regime: Regime
    position: int
    """1 is the first draft of a block."""
    error: float
    """Expected calibration error of the survival, as the policy sees it."""
    num_observed: int
    """Rounds that it stands on, the older ones fading: at most some 2,000."""
    correction: float
    """Logits added to the drafter's confidences."""


class CalibrationMonitor(StepObserver):
    """Counts by regime and position. Written by the step thread only."""

    def __init__(self, block_size: int, *, observes_all: bool = False, corrects: bool = True) -> None:
        """`observes_all`: windows do not depend on confidences, so that every round counts. `corrects`: whether
        confidences are changed, or only judged."""
        self._observes_all, self._corrects = observes_all, corrects
        shape = (max(Regime) + 1, block_size)
        self._shifts, self._information = np.zeros(shape), np.full(shape, _PRIOR)
        self._odds = np.ones(shape)
        """exp(shift), or 1 if nothing is corrected."""
        self._counts = np.zeros((*shape, NUM_BINS))
        self._predicted, self._accepted = np.zeros_like(self._counts), np.zeros_like(self._counts)

    def corrected(self, confidences: npt.NDArray[np.float32], regimes: Sequence[Regime]) -> npt.NDArray[np.float32]:
        """[rows, drafts] confidences with the regime's correction; what is no probability stays none."""
        odds = self._odds[list(regimes), : confidences.shape[1]]
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = confidences * odds
            corrected: npt.NDArray[np.float32] = (scaled / (1.0 - confidences + scaled)).astype(np.float32)
        return corrected

    def observe(self, record: StepRecord) -> None:
        """See `StepObserver`."""
        for each in record.rounds:
            if each.draft_ids and (each.is_audit or self._observes_all):
                self._add(each)

    def _add(self, each: RowRound) -> None:
        regime, num_observed = each.sequence.sampling.regime, each.verify_len
        if not num_observed:
            return
        own = each.confidences[:num_observed]
        current = self.corrected(own[None], [regime])[0].astype(np.float64)
        survival = np.cumprod(current)
        positions = np.arange(num_observed)
        bins = np.minimum((survival * NUM_BINS).astype(np.intp), NUM_BINS - 1)
        for table, values in (
            (self._counts, np.ones(num_observed)),
            (self._predicted, survival),
            (self._accepted, positions < each.num_accepted),
        ):
            table[regime, :num_observed] *= _MEMORY
            table[regime, positions, bins] += values
        if self._corrects:
            self._learn(regime, own[: each.num_accepted + 1].astype(np.float64), each.num_accepted)

    def _learn(self, regime: Regime, reached: Floats, num_accepted: int) -> None:
        """One Newton step of the logistic likelihood in each shift, over what was seen so far: positions that were
        reached, i.e. all accepted ones and the first that was not. Its gain falls as 1 / rounds and ends at the
        memory's, so single rounds move little."""
        count = reached.size
        reached = np.clip(reached, 1e-6, 1 - 1e-6)
        odds = reached / (1 - reached) * np.exp(self._shifts[regime, :count])
        expected = odds / (1 + odds)
        self._information[regime, :count] = (
            _PRIOR + (self._information[regime, :count] - _PRIOR) * _MEMORY + expected * (1 - expected)
        )
        surprise = (np.arange(count) < num_accepted) - expected
        shifts = self._shifts[regime, :count] + surprise / self._information[regime, :count]
        self._shifts[regime, :count] = np.clip(shifts, -_MAX_SHIFT, _MAX_SHIFT)
        self._odds[regime, :count] = np.exp(self._shifts[regime, :count])

    def errors(self) -> list[CalibrationError]:
        """Of every regime and position that was observed."""
        found = []
        gaps = np.abs(self._predicted - self._accepted).sum(axis=2)
        totals = self._counts.sum(axis=2)
        for regime in Regime:
            for position in np.flatnonzero(totals[regime]):
                total, shift = totals[regime, position], float(self._shifts[regime, position])
                error = float(gaps[regime, position] / total)
                found.append(CalibrationError(regime, int(position) + 1, error, round(float(total)), shift))
        return found
