"""Audits: a small share of drafted rows is verified whole, whatever their confidences, so that calibration can be
judged on rounds that nobody has selected.

Which rows is decided before the draft pass by randomness of its own: a function of the request's id, the choice and the
round, never of a confidence. So an audit's length is as legal as any that was fixed before drafting (design 5.1), and
the audited rounds are a fair sample of all drafted ones.

The price is the drafts behind the windows that those rows would have had: with a share s, windows of ℓ on average and
blocks of n, s · (n - ℓ) more verified drafts for each drafted row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from scheduler_service.policy import DraftedBatch, VerifyPolicy, Windows
from scheduler_service.policy.survival import usable_lens


def is_audited(request_id: str, choice: int, round_: int, share: float) -> bool:
    """Whether a row's round is audited, for a share of rounds in [0, 1].

    By a hash of the request's id, not by its sampling key: greedy requests have none, and seeds are the client's.
    """
    if not share:
        return False
    digest = hashlib.blake2b(f"{request_id} {choice} {round_}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def audited_windows(policy: VerifyPolicy, batch: DraftedBatch, is_audit: Sequence[bool]) -> Windows:
    """The policy's windows, and whole blocks for audited rows (as far as confidences can be used, design 5.8).

    To the policy an audited row is one that verifies nothing beyond work that is fixed: its drafts count as token rows
    and context of the step, and against the budget.
    """
    if not any(is_audit):
        return policy.windows(batch)
    block_len = batch.confidences.shape[1]
    limits = list(batch.max_drafts)
    fixed = [min(limit, block_len) if audit else 0 for limit, audit in zip(limits, is_audit, strict=True)]
    contexts = batch.contexts or [0] * len(limits)
    others = replace(
        batch,
        max_drafts=[0 if audit else limit for limit, audit in zip(limits, is_audit, strict=True)],
        num_tokens=batch.num_tokens + sum(fixed),
        num_context=batch.num_context + sum(n * each for n, each in zip(fixed, contexts, strict=True)),
        max_budget=None if batch.max_budget is None else max(0, batch.max_budget - sum(fixed)),
    )
    windows = policy.windows(others)
    whole, num_invalid = usable_lens(batch.confidences, fixed)
    return windows._replace(
        verify_lens=[max(one, int(other)) for one, other in zip(windows.verify_lens, whole, strict=True)],
        commit_lens=[max(one, int(other)) for one, other in zip(windows.commit_lens, whole, strict=True)],
        num_invalid=windows.num_invalid + num_invalid,
    )
