"""Latency targets: how many drafts a step may verify so that its rows keep the time per token that was asked for.

Fixed before the draft pass, from committed history and the cost model alone, so it cannot bias what is generated
(design 6). It caps what drafts add to a step; a batch that is too slow without drafts needs fewer requests at once
(`max_num_seqs`), not fewer drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scheduler_service.policy import StepCosts, StepWork


class TimedRow(NamedTuple):
    """A decode row with a target."""

    target_ns: float
    """Most time per token."""
    expected_tokens: float
    """Tokens that the step is expected to commit for it, by its history; at least 1."""


def draft_budget(
    costs: StepCosts, work: StepWork, rows: Sequence[TimedRow], num_drafts: int, context_len: int
) -> int | None:
    """Most drafts to verify, of `num_drafts` that read at most `context_len` positions each; None if no target binds.

    With K drafts verified the step takes T(K), and a row's time per token is expected to be T(K) / its tokens: K is the
    largest number that keeps every row at its target, 0 if even drafting without verifying is too slow.
    """
    if not rows:
        return None
    limit_ns = min(row.target_ns * row.expected_tokens for row in rows)
    step_ns = costs.total_ns(work, np.full(num_drafts, float(context_len)))
    count = int(np.count_nonzero(step_ns <= limit_ns))  # T never falls
    return None if count > num_drafts else max(0, count - 1)
