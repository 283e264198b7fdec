"""What an executor has not been told yet about slots and page tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.sampling import SlotSampling, TargetOptions


@dataclass
class SlotUpdates:
    """Pending changes of one executor; they ride in its next call: releases, then admissions, then page entries."""

    releases: list[int] = field(default_factory=list)
    admissions: dict[int, SlotSampling] = field(default_factory=dict)
    page_slots: list[int] = field(default_factory=list)
    page_indices: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    targets: dict[int, TargetOptions] = field(default_factory=dict)
    """Of admitted slots, where the target is asked for more."""

    def release(self, slot: int) -> None:
        """The slot's request is gone; what was pending for it is moot."""
        self.admissions.pop(slot, None)
        self.targets.pop(slot, None)
        if slot in self.page_slots:
            kept = [i for i, owner in enumerate(self.page_slots) if owner != slot]
            self.page_slots = [self.page_slots[i] for i in kept]
            self.page_indices = [self.page_indices[i] for i in kept]
            self.page_ids = [self.page_ids[i] for i in kept]
        if slot not in self.releases:
            self.releases.append(slot)

    def admit(self, slot: int, sampling: SlotSampling, target: TargetOptions | None = None) -> None:
        """A request takes the slot, with an empty page table. `target` is for the verifier alone."""
        self.admissions[slot] = sampling
        if target is not None:
            self.targets[slot] = target

    def set_pages(self, slot: int, first_index: int, pages: list[int]) -> None:
        """Entries first_index ... of the slot's page table."""
        self.page_slots += [slot] * len(pages)
        self.page_indices += range(first_index, first_index + len(pages))
        self.page_ids += pages

    def take(self) -> SlotUpdates:
        """Returns the pending changes and forgets them."""
        taken = SlotUpdates(
            self.releases, self.admissions, self.page_slots, self.page_indices, self.page_ids, self.targets
        )
        self.releases, self.admissions, self.targets = [], {}, {}
        self.page_slots, self.page_indices, self.page_ids = [], [], []
        return taken
