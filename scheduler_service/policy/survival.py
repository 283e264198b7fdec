"""Arithmetic on confidences that every policy shares. Pure functions over plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Usable(NamedTuple):
    """Drafts whose confidences can be used."""

    lens: npt.NDArray[np.intp]
    """[rows]."""
    num_invalid: int
    """Rows cut short of their limit."""


class Candidates(NamedTuple):
    """Drafts in the order in which they are admitted."""

    rows: npt.NDArray[np.intp]
    """[candidates]."""
    gains: npt.NDArray[np.float64]
    """[candidates] expected tokens each adds, never rising."""


def usable_lens(confidences: npt.NDArray[np.float32], max_drafts: Sequence[int] | npt.NDArray[np.intp]) -> Usable:
    """Leading drafts of each row within its limit, up to the first confidence that is NaN or outside [0, 1].

    Never the whole row: the confidence of draft k has seen the drafts before k, so what it is must not decide about
    them (design 5.8).
    """
    num_drafts = confidences.shape[1]
    is_valid = (confidences >= 0) & (confidences <= 1)  # NaN compares false
    limits = np.minimum(np.asarray(max_drafts, np.intp), num_drafts)
    if is_valid.all():  # nearly always
        return Usable(limits, 0)
    first_invalid = np.where(is_valid.all(axis=1), num_drafts, is_valid.argmin(axis=1))
    return Usable(np.minimum(limits, first_invalid), int(np.count_nonzero(first_invalid < limits)))


def survivals(confidences: npt.NDArray[np.float32], lens: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Survival of each draft, [rows, drafts]; 0 beyond a row's `lens`."""
    is_usable = np.arange(confidences.shape[1]) < lens[:, None]
    return np.cumprod(np.where(is_usable, confidences, 0.0), axis=1, dtype=np.float64)


def admission_order(gains: npt.NDArray[np.float64]) -> Candidates:
    """Drafts by gain descending, then position ascending, then row ascending; those that gain nothing are left out.

    `gains`: [rows, drafts] survival, times the row's weight where rows have one; never rising along a row. So a prefix
    of this order takes a prefix of every row.
    """
    by_position = gains.T.ravel()  # position-major: a stable sort then breaks ties by position, then row
    count = int(np.count_nonzero(by_position))
    order = np.argsort(-by_position)[:count]  # not stable, but four times as fast
    ordered = by_position[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(-by_position, kind="stable")[:count]
    return Candidates(order % gains.shape[0], ordered)


def lens_of(rows: npt.NDArray[np.intp], num_rows: int) -> npt.NDArray[np.intp]:
    """[num_rows] windows when the drafts of `rows` are admitted."""
    return np.bincount(rows, minlength=num_rows)


def throughput(
    gains: npt.NDArray[np.float64], plain_gain: float, step_ns: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Θ: expected tokens per nanosecond with the first 0, 1 … n candidates admitted; [n + 1]."""
    expected = np.cumsum(np.concatenate(([plain_gain], gains)))
    result: npt.NDArray[np.float64] = expected / step_ns
    return result
