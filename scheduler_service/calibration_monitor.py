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

from kernels import survivals
from kernels.sampling import Regime
from scheduler_service.step_record import StepObserver, StepRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

NUM_BINS = 15
"""Of survivals, of equal width on [0, 1]: as in `dspark calibrate`."""
_MEMORY = 0.9995
"""Weight that counts keep from round to round: some 2,000 rounds count."""
_DAMPING = 25.0
"""Information that is added to what rounds brought, so that the first ones move little: that of a hundred even bets."""
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
        self._shifts, self._information = np.zeros(shape), np.full(shape, _DAMPING)
        self._odds = np.ones(shape)
        """exp(shift), or 1 if nothing is corrected."""
        self._counts = np.zeros((*shape, NUM_BINS))
        self._predicted, self._accepted = np.zeros_like(self._counts), np.zeros_like(self._counts)

    def corrected(
        self, confidences: npt.NDArray[np.float32], regimes: Sequence[Regime] | Ints
    ) -> npt.NDArray[np.float32]:
        """[rows, drafts] confidences with the regime's correction; what is no probability stays none."""
        return survivals.corrected(confidences, self.odds(regimes, confidences.shape[1]))

    def odds(self, regimes: Sequence[Regime] | Ints, num_slots: int) -> Floats:
        """[rows, num_slots] what `corrected` multiplies the odds of their confidences by."""
        odds: Floats = self._odds[np.asarray(regimes), :num_slots]
        return odds

    def observe(self, record: StepRecord) -> None:
        """See `StepObserver`. All rows at once: in modes that verify whole blocks every row counts in every step."""
        given = [each for each in record.rounds if each.verify_len and (each.is_audit or self._observes_all)]
        if not given:
            return
        confidences = np.full((len(given), self._shifts.shape[1]), np.nan, np.float32)
        for row, each in zip(confidences, given, strict=True):
            row[: each.verify_len] = each.confidences[: each.verify_len]
        regimes = np.array([each.sequence.sampling.regime for each in given])
        accepted = np.array([each.num_accepted for each in given])
        corrected = self.corrected(confidences, regimes).astype(np.float64)
        self._judge(regimes, corrected, accepted)
        if self._corrects:
            self._learn(regimes, corrected, accepted)

    def _judge(self, regimes: Ints, confidences: Floats, num_accepted: Ints) -> None:
        survival = np.cumprod(confidences, axis=1)
        rows, positions = np.nonzero(~np.isnan(survival))
        predicted, cells = survival[rows, positions], (regimes[rows], positions)
        self._fade(cells, self._counts, self._predicted, self._accepted)
        bins = (*cells, np.minimum((predicted * NUM_BINS).astype(np.intp), NUM_BINS - 1))
        np.add.at(self._counts, bins, 1.0)
        np.add.at(self._predicted, bins, predicted)
        np.add.at(self._accepted, bins, positions < num_accepted[rows])

    def _learn(self, regimes: Ints, confidences: Floats, num_accepted: Ints) -> None:
        """One Newton step of the logistic likelihood in each shift, from what was seen so far, over positions that were
        reached: all accepted ones and the first that was not. Its gain falls as 1 / rounds down to the memory's, so
        that a round moves little. Certainties teach nothing: no shift moves them."""
        is_reached = np.arange(confidences.shape[1]) <= num_accepted[:, None]
        rows, positions = np.nonzero(is_reached & (confidences > 0) & (confidences < 1))
        expected, cells = confidences[rows, positions], (regimes[rows], positions)
        surprises = np.zeros_like(self._shifts)
        np.add.at(surprises, cells, (positions < num_accepted[rows]) - expected)
        self._information -= _DAMPING
        self._fade(cells, self._information)
        np.add.at(self._information, cells, expected * (1.0 - expected))
        self._information += _DAMPING
        self._shifts = np.clip(self._shifts + surprises / self._information, -_MAX_SHIFT, _MAX_SHIFT)
        self._odds = np.exp(self._shifts)

    def _fade(self, cells: tuple[Ints, Ints], *tables: Floats) -> None:
        """For every round that comes in at a regime and position."""
        num_new = np.zeros_like(self._shifts)
        np.add.at(num_new, cells, 1.0)
        kept = _MEMORY**num_new
        for table in tables:
            table *= kept.reshape(*kept.shape, *[1] * (table.ndim - kept.ndim))

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
