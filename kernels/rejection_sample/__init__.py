"""Acceptance of one verify row: how many drafts survive and which token follows them.

Glossary: *accepted* drafts are a prefix of the window; the *recovered* token replaces the first rejected draft; the
*bonus* token follows a window accepted whole. Draft k (from 0) is judged by target row k.

`accept_row(...) -> RowOutcome` in `reference.py` and `cpu.py`. The three regimes:

- greedy: a draft survives iff it is the target's arg max (lowest id wins ties);
- coupled: iff it is the target's own seeded sample, arg min E[v] / target_probs[v] with E of `kernels.philox`: the
  outcome is that sample whatever was drafted;
- rejection (Leviathan et al. 2023, Chen et al. 2023): with probability min(1, target_prob / draft_prob); the
  recovered token is drawn from the normalised positive part of target_probs - draft_probs, the bonus from target_probs.

The draft distribution of a row is draft_probs divided by its float64 sum, which is what `kernels.markov_sample` draws
from. A draft that it cannot have produced (probability 0, outside the draft vocabulary, no draft_probs given) counts
as drawn from a point mass: accepted with probability target_prob, else the target without that token is sampled.
That is exact for any token chosen without knowledge of this round's acceptance noise.

A rejection row also tells the target probabilities of tokens that it is asked about, where it computed them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.target_probs import InvalidRowError


class RowOutcome(NamedTuple):
    """What a row commits."""

    accepted_len: int
    """Accepted drafts, 0 ... number of drafts."""
    token_ids: list[int]
    """The accepted drafts, then the recovered or bonus token: accepted_len + 1 target ids."""
    asked_probs: tuple[float, ...] = ()
    """Target probability of each token asked for; NaN where no token was emitted, and in the other regimes."""


class AskedToken(NamedTuple):
    """A token of which the target probability is wanted."""

    row: int
    """Of the target row that judges or follows the drafts, from 0."""
    token_id: int


def answer_asks(asked: Sequence[AskedToken], row: int, probs: npt.NDArray[np.float64], answers: list[float]) -> None:
    """Fills in what is asked about target row `row`, whose distribution is `probs` [V]."""
    for place, ask in enumerate(asked):
        if ask.row == row:
            answers[place] = float(probs[ask.token_id])


__all__ = ["AskedToken", "InvalidRowError", "RowOutcome", "answer_asks"]
