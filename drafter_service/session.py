"""What one scheduler session holds on the drafter: slots, draft K/V pages and shared-memory arenas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.config import DrafterConfig
from drafter_service.model import PAGE_SIZE, DraftCache
from drafter_service.records import DraftResult, Ingests, IntArray, SessionArenas, SessionSizes
from service_kit.engine_thread import EngineThread, StepReplies
from service_kit.errors import StaleArenaError
from service_kit.handoff import Arena, ArenaSpec
from service_kit.slots import SlotTable


class FeatureRows(NamedTuple):
    """Context rows read from the verifier's ring."""

    features: npt.NDArray[np.float32]  # [M, feature_size], a copy
    slots: IntArray  # [M]
    positions: IntArray  # [M]
    failures: dict[int, str]
    """Ingests of which nothing is here, and why."""


class Session:
    """State of a session. Dropped whole when another one starts."""

    def __init__(self, session_id: int, sizes: SessionSizes, config: DrafterConfig, thread: EngineThread) -> None:
        """Empty slots and zeroed pages; `map_ring` follows."""
        self.id, self.sizes, self._config = session_id, sizes, config
        self.slots = SlotTable(sizes.num_slots, sizes.num_pages, sizes.max_model_len, PAGE_SIZE)
        self.page_table = torch.from_numpy(self.slots.page_table)
        """int32 [num_slots, max_pages], the same memory as the slot table's."""
        self.cache = DraftCache(config, sizes.num_pages, num_positions=self.slots.page_table.shape[1] * PAGE_SIZE)
        self.replies: StepReplies[DraftResult] = StepReplies(thread)
        self._ring: Arena | None = None
        self._draft_probs: Arena | None = None
        self._draft_to_target: Arena | None = None

    @property
    def arena_bytes(self) -> dict[str, int]:
        """Shared memory that the session owns, by arena."""
        owned = {"draft_probs": self._draft_probs, "draft_to_target": self._draft_to_target}
        return {name: arena.spec.total_bytes for name, arena in owned.items() if arena is not None}

    def close(self) -> None:
        """Drops the arenas."""
        for arena in (self._ring, self._draft_probs, self._draft_to_target):
            if arena is not None:
                arena.close()
        self._ring = self._draft_probs = self._draft_to_target = None

    def map_ring(self, name: str, draft_to_target: npt.NDArray[np.uint32] | None, epoch: int) -> SessionArenas:
        """Maps the feature ring; for a new ring also makes the drafter's own arenas, whose reader is new too.

        Raises StaleArenaError if the ring is not the session's or has another shape.
        """
        if self._ring is None or self._ring.name != name:
            ring = self._attach_ring(name)
            self.close()
            self._ring = ring
            shape = (self.sizes.num_slots, self._config.block_size, self._config.draft_vocab_size)
            self._draft_probs = Arena.create(ArenaSpec(shape, np.float32, 1, self.id, epoch))
            if draft_to_target is not None:
                spec = ArenaSpec(draft_to_target.shape, np.uint32, 0, self.id, epoch)
                self._draft_to_target = Arena.create(spec)
                self._draft_to_target.rows[:] = draft_to_target
        assert self._draft_probs is not None
        return SessionArenas(self._draft_probs.name, self._draft_to_target.name if self._draft_to_target else "")

    def _attach_ring(self, name: str) -> Arena:
        arena = Arena.attach(name, session=self.id)
        shape, width = arena.spec.shape, self._config.feature_size
        fits = len(shape) == 3 and (shape[0], shape[2]) == (self.sizes.num_slots, width) and shape[1] > 0
        if not fits or np.dtype(arena.spec.dtype) != np.float32 or arena.spec.stamp_dims != 2:
            arena.close()
            raise StaleArenaError(
                f"feature ring {name} is {list(shape)} {np.dtype(arena.spec.dtype)}: the drafter reads "
                f"[{self.sizes.num_slots}, rows, {width}] float32 with one stamp a row"
            )
        return arena

    def draft_probs_of(self, slot: int, round_: int, first_position: int) -> npt.NDArray[np.float32]:
        """The slot's rows of draft distributions, [block_size, Vd], stamped for this round before they are written."""
        assert self._draft_probs is not None
        self._draft_probs.stamps[slot] = np.array((self.id, round_, slot, first_position), np.uint64)
        rows: npt.NDArray[np.float32] = self._draft_probs.rows[slot]
        return rows

    def read_features(self, ingests: Ingests) -> FeatureRows:
        """Reads and checks feature rows; an ingest with one bad stamp is left out whole."""
        assert self._ring is not None
        first_rows = np.cumsum(ingests.counts) - ingests.counts
        ingest = np.repeat(np.arange(len(ingests.counts)), ingests.counts)  # [M], the ingest of each row
        slots = ingests.slots[ingest]
        positions = ingests.starts[ingest] + np.arange(len(ingest)) - first_rows[ingest]
        ring_rows = positions % self._ring.spec.shape[1]
        session_ids, step_ids, stamp_slots, stamp_positions = self._ring.stamps[slots, ring_rows].T
        is_stale = (
            (session_ids != self.id)
            | (step_ids < ingests.oldest_step_ids[ingest])
            | (step_ids > ingests.newest_step_ids[ingest])
            | (stamp_slots != slots.astype(np.uint64))
            | (stamp_positions != positions.astype(np.uint64))
        )
        failures: dict[int, str] = {}
        if is_stale.any():
            for row in np.flatnonzero(is_stale):
                failures.setdefault(
                    int(ingest[row]),
                    f"feature row of slot {slots[row]}, position {positions[row]} is stale: stamped session "
                    f"{session_ids[row]}, step {step_ids[row]}, slot {stamp_slots[row]}, position "
                    f"{stamp_positions[row]}",
                )
            kept = ~np.isin(ingest, list(failures))
            slots, positions, ring_rows = slots[kept], positions[kept], ring_rows[kept]
        return FeatureRows(self._ring.rows[slots, ring_rows], slots, positions, failures)
