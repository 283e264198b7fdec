"""Verify everything that was drafted."""

from __future__ import annotations

from scheduler_service.policy.base import DraftedBatch


class StaticPolicy:
    """Whole blocks."""

    def verify_lens(self, batch: DraftedBatch) -> list[int]:
        """Each row's own limit."""
        return batch.max_drafts
