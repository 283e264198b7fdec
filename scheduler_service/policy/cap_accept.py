"""Whole blocks verified, only the scheduled windows committed: what trimming leaves unaccepted, measured.

It saves nothing. The text is distributed as under the scheduling policy it wraps (token by token the same for greedy
and coupled rows), and the verifier tells how many drafts it *would* have accepted: the uncensored accepted length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.base import DraftedBatch, VerifyPolicy, Windows


class CapAcceptPolicy(VerifyPolicy):
    """Whole blocks to verify, the windows of another policy to commit."""

    def __init__(self, scheduled: VerifyPolicy) -> None:
        self._scheduled = scheduled

    def prepare(self, batch: DraftedBatch) -> None:
        """See `VerifyPolicy`."""
        self._scheduled.prepare(batch)

    def windows(self, batch: DraftedBatch) -> Windows:
        """Both lengths of each row."""
        return super().windows(batch)._replace(commit_lens=self._scheduled.windows(batch).verify_lens)

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        """Whole blocks."""
        return usable


class CommitCut(NamedTuple):
    """What is committed of a verified row."""

    num_accepted: int
    token_ids: list[int]
    """Accepted drafts and one more token."""


def commit_cut(num_accepted: int, token_ids: list[int], commit_len: int) -> CommitCut:
    """Cuts what the verifier emitted for a row to `commit_len` drafts and one more token.

    Behind the window the verifier has judged draft `commit_len + 1`: accepted or replaced, it is a sample of the target
    at that position, so it takes the place of the bonus token.
    """
    return CommitCut(min(num_accepted, commit_len), token_ids[: commit_len + 1])
