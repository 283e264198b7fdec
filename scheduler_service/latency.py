"""Latency targets: how many drafts a step may verify so that its rows keep the time per token that was asked for.

Fixed before the draft pass, from committed history and the cost model alone, so it cannot bias what is generated
(design 6). It caps what drafts add to a step; a batch that is too slow without drafts needs fewer requests at once
(`max_num_seqs`), not fewer drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler_service.draft_history import Floats, Ints
from scheduler_service.policy import StepCosts, StepWork


class TimedRows(NamedTuple):
    """The decode rows of a step, and what is expected of their drafts by history."""

    target_ns: Floats
    """[decode rows] most time per token; infinity where there is no target."""
    drafted: Ints
    """[drafted] which of them are drafted."""
    survivals: Floats
    """[drafted, slots] expected of each draft, never rising along a row; 0 where nothing is known."""
    weights: Floats
    """[drafted] what a token of the row counts for where drafts compete."""


def draft_budget(costs: StepCosts, work: StepWork, rows: TimedRows, context_len: int) -> int | None:
    """Most drafts to verify, of those that read at most `context_len` positions each; None if no target binds.

    With the K drafts of highest expected gain verified the step takes T(K), and a row's time per token is expected to
    be T(K) / (1 + survivals of its own among the K): K is the largest number that keeps every row at its target, 0 if
    none does, not even drafting without verifying.
    """
    target_ns, drafted, survivals, weights = rows
    count = survivals.size
    step_ns = costs.total_ns(work, np.full(count, float(context_len)))  # never falls
    order = np.argsort(-(survivals * weights[:, None]).ravel(), kind="stable")
    ranks = np.empty(count, np.intp)
    ranks[order] = np.arange(1, count + 1)
    # Between two of its own drafts a row expects the same tokens while T rises: it is late from some K on.
    own, edge = ranks.reshape(survivals.shape), (drafted.size, 1)
    begins, ends = np.hstack((np.zeros(edge, np.intp), own)), np.hstack((own, np.full(edge, count + 1)))
    tokens = 1.0 + np.hstack((np.zeros(edge), np.cumsum(survivals, axis=1)))
    late = np.searchsorted(step_ns, target_ns[drafted, None] * tokens, side="right")
    late = np.clip(late, begins, ends)
    num_late = np.zeros(count + 2, np.intp)
    np.add.at(num_late, late, 1)
    np.add.at(num_late, ends, -1)
    in_time = np.cumsum(num_late)[: count + 1] == 0
    in_time &= step_ns <= np.delete(target_ns, drafted).min(initial=np.inf)
    kept = np.flatnonzero(in_time)
    budget = int(kept[-1]) if kept.size else 0
    return None if budget == count else budget
