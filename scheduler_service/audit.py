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

import numpy as np
import numpy.typing as npt

from scheduler_service.policy import DraftedBatch, VerifyPolicy, Windows
from scheduler_service.policy.survival import usable_lens


def audit_key(request_id: str, choice: int) -> int:
    """64 bits that the audits of a choice follow from.

    A hash of the request's id, not its sampling key: greedy requests have none, and seeds are the client's.
    """
    return int.from_bytes(hashlib.blake2b(f"{request_id} {choice}".encode(), digest_size=8).digest(), "little")


def are_audited(keys: Sequence[int], rounds: Sequence[int], share: float) -> npt.NDArray[np.bool_]:
    """Whether a row's round is audited, for a share of rounds in [0, 1]; [rows].

    By number `round` of the SplitMix64 generator (Steele, Lea, Flood 2014) that the row's key is the seed of.
    """
    mixed = np.array(keys, np.uint64) + np.array(rounds, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    audited: npt.NDArray[np.bool_] = (mixed >> np.uint64(11)) * 2.0**-53 < share
    return audited


def without_audited(batch: DraftedBatch, is_audit: Sequence[bool]) -> DraftedBatch:
    """The step as the policy sees it: an audited row verifies nothing beyond work that is fixed. Its drafts count as
    token rows and context of the step, and against the budget."""
    if not any(is_audit):
        return batch
    limits = np.asarray(batch.max_drafts, np.intp)
    fixed = np.where(is_audit, np.minimum(limits, batch.confidences.shape[1]), 0)
    num_fixed = int(fixed.sum())
    return replace(
        batch,
        max_drafts=np.where(is_audit, 0, limits),
        num_tokens=batch.num_tokens + num_fixed,
        num_context=batch.num_context + (float(fixed @ np.asarray(batch.contexts)) if len(batch.contexts) else 0.0),
        max_budget=None if batch.max_budget is None else max(0, batch.max_budget - num_fixed),
    )


def audited_windows(policy: VerifyPolicy, batch: DraftedBatch, is_audit: Sequence[bool]) -> Windows:
    """The policy's windows, and whole blocks for audited rows (as far as confidences can be used, design 5.8)."""
    windows = policy.windows(without_audited(batch, is_audit))
    if not any(is_audit):
        return windows
    whole, num_invalid = usable_lens(batch.confidences, np.where(is_audit, batch.max_drafts, 0))
    return windows._replace(
        verify_lens=np.maximum(windows.verify_lens, whole).tolist(),
        commit_lens=np.maximum(windows.commit_lens, whole).tolist(),
        num_invalid=windows.num_invalid + num_invalid,
    )
