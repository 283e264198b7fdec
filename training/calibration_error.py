"""How far predicted survivals are from what happens: expected calibration error, reliability, threshold sweep.

*Survival* of position k: the product of the first k confidences, the predicted probability that the first k drafts are
all accepted. ECE = Σ over bins of (share of rounds in the bin) · |mean survival − share in which the first k were
accepted|, with 15 bins of equal width on [0, 1]. Even a perfect prediction has an ECE above 0 on finitely many rounds:
`noise_floor` is its expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from training.rounds import Floats, Rounds

NUM_BINS = 15


class Terms(NamedTuple):
    """A calibration, [block size] each: confidences are σ(logit / temperature + shift)."""

    temperatures: list[float]
    shifts: list[float]

    def confidences(self, logits: Floats) -> Floats:
        """[N, n] of logits [N, n]."""
        length = logits.shape[1]
        scaled = logits / np.array(self.temperatures[:length]) + np.array(self.shifts[:length])
        with np.errstate(invalid="ignore"):  # NaN: nothing was drafted there
            found: Floats = np.exp(-np.logaddexp(0.0, -scaled))
        return found


def no_terms(block_size: int) -> Terms:
    """Leaves confidences as they are."""
    return Terms([1.0] * block_size, [0.0] * block_size)


class Bins(NamedTuple):
    """A reliability diagram; entries of bins that are not empty."""

    predicted: Floats
    """Mean prediction of each bin."""
    observed: Floats
    """Share of outcomes that were true."""
    counts: npt.NDArray[np.intp]

    @property
    def error(self) -> float:
        """Expected calibration error."""
        return float(self.counts @ np.abs(self.predicted - self.observed) / max(1, self.counts.sum()))

    @property
    def noise_floor(self) -> float:
        """Expected `error` of a perfect prediction on as many rounds (normal approximation)."""
        deviations = np.sqrt(np.maximum(self.predicted * (1 - self.predicted), 0.0) / self.counts)
        return float(np.sqrt(2 / np.pi) * (self.counts @ deviations) / max(1, self.counts.sum()))


class SweepPoint(NamedTuple):
    """Windows that end before the first confidence below a threshold."""

    threshold: float
    acceptance_rate: float
    """Accepted of verified drafts; NaN if none was verified."""
    tokens_per_step: float
    """Committed tokens of a round, the bonus or recovered one included."""
    mean_verify_len: float


def reliability(predicted: Floats, is_true: npt.NDArray[np.bool_], num_bins: int = NUM_BINS) -> Bins:
    """Bins of equal width. `predicted`: [N] in [0, 1]; `is_true`: [N]."""
    index = np.minimum((predicted * num_bins).astype(np.intp), num_bins - 1)
    counts = np.bincount(index, minlength=num_bins)
    filled = counts > 0
    sums = np.bincount(index, predicted, num_bins)[filled], np.bincount(index, is_true, num_bins)[filled]
    counts = counts[filled]
    return Bins(sums[0] / counts, sums[1] / counts, counts)


def position_bins(rounds: Rounds, terms: Terms) -> list[Bins]:
    """Reliability of the survival of each position."""
    found = []
    for position in range(rounds.block_size):
        known = rounds.at(position)
        survival = terms.confidences(known.logits).prod(axis=1)
        found.append(reliability(survival, known.num_accepted > position))
    return found


def mean_error(bins: Sequence[Bins]) -> float:
    """ECE over positions, weighted by their rounds; NaN without rounds."""
    counts = [int(each.counts.sum()) for each in bins]
    return float(np.average([each.error for each in bins], weights=counts)) if sum(counts) else float("nan")


def threshold_sweep(rounds: Rounds, terms: Terms, thresholds: Sequence[float]) -> list[SweepPoint]:
    """What windows by threshold on the conditional confidences would have verified and accepted of these rounds."""
    confidences, points = terms.confidences(rounds.logits), []
    for threshold in thresholds:
        is_sure = confidences >= threshold  # NaN compares false: nothing was drafted there
        lens = np.where(is_sure.all(axis=1), rounds.block_size, is_sure.argmin(axis=1))
        accepted = np.minimum(rounds.num_accepted, lens)
        rate = accepted.sum() / lens.sum() if lens.sum() else float("nan")
        points.append(SweepPoint(threshold, float(rate), float(1 + accepted.mean()), float(lens.mean())))
    return points
