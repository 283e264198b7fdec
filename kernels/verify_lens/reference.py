"""The truth: all drafts in one sorted list."""

from __future__ import annotations

from torch import Tensor


def verify_lens(survivals: Tensor, limits: Tensor, budget: Tensor, lens: Tensor) -> None:
    """Writes `lens` [R] (see the package)."""
    num_rows, num_slots = survivals.shape
    drafts = [
        (-float(survivals[row, slot]), slot, row)
        for row in range(num_rows)
        for slot in range(min(num_slots, int(limits[row])))
        if survivals[row, slot] > 0
    ]
    chosen = [row for _, _, row in sorted(drafts)[: int(budget)]]
    for row in range(num_rows):
        if limits[row] >= 0:
            lens[row] = chosen.count(row)
