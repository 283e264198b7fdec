"""What one scheduler session holds on the drafter: slots, draft K/V pages and shared-memory arenas."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from dspark.v1 import types_pb2
from torch import Tensor

from drafter_service.model import PAGE_SIZE, DrafterModel
from drafter_service.records import DraftResult, DraftRows, Ingests, IntArray, SessionArenas, SessionSizes
from drafter_service.session_memory import plan_session
from service_kit.device_memory import DeviceMemory
from service_kit.engine_thread import EngineThread, StepReplies
from service_kit.errors import StaleArenaError
from service_kit.gpu import Gpu
from service_kit.handoff import Arena, ArenaSpec
from service_kit.slots import SlotTable


class FeatureRows(NamedTuple):
    """Context rows read from the verifier's ring."""

    features: npt.NDArray[np.float32]  # [M, feature_size], a copy; empty if the ring is on a device
    ring_rows: IntArray  # [M] places among all rows of the ring
    slots: IntArray  # [M]
    positions: IntArray  # [M]
    failures: dict[int, str]
    """Ingests of which nothing is here, and why."""


class Session:
    """State of a session. Dropped whole when another one starts."""

    def __init__(
        self, session_id: int, sizes: SessionSizes, model: DrafterModel, thread: EngineThread, gpu: Gpu | None = None
    ) -> None:
        """Empty slots and zeroed pages, on `gpu` if there is one; `map_ring` follows.

        Raises ConfigurationError naming a setting and a value that fits if the device is too small.
        """
        config = model.config
        plan = plan_session(sizes, model, gpu)
        plan.settle()
        self.id, self.sizes, self._config, self._gpu = session_id, sizes, config, gpu
        self._feature_type = model.like.dtype
        self._changed_slots: set[int] = set()
        self.slots = SlotTable(sizes.num_slots, sizes.num_pages, sizes.max_model_len, PAGE_SIZE)
        self.page_table = torch.from_numpy(self.slots.page_table)
        """int32 [num_slots, max_pages], the same memory as the slot table's."""
        num_positions = self.slots.page_table.shape[1] * PAGE_SIZE
        try:
            self.cache = model.make_cache(sizes.num_pages, num_positions)
        except (MemoryError, RuntimeError) as error:
            raise plan.failure(error) from error
        self.replies: StepReplies[DraftResult] = StepReplies(thread)
        self._ring: Arena | None = None
        self._draft_probs: Arena | None = None
        self._draft_to_target: Arena | None = None
        self._blocks: Arena | None = None

    @property
    def arena_bytes(self) -> dict[str, int]:
        """Shared memory that the session owns, by arena."""
        owned = {"draft_probs": self._draft_probs, "draft_to_target": self._draft_to_target, "blocks": self._blocks}
        return {name: arena.spec.total_bytes for name, arena in owned.items() if arena is not None}

    def close(self) -> None:
        """Drops the arenas."""
        for arena in (self._ring, self._draft_probs, self._draft_to_target, self._blocks):
            if arena is not None:
                arena.close()
        self._ring = self._draft_probs = self._draft_to_target = self._blocks = None

    def map_ring(self, name: str, draft_to_target: npt.NDArray[np.uint32] | None, epoch: int) -> SessionArenas:
        """Maps the feature ring; for a new ring also makes the drafter's own arenas, whose reader is new too.

        Raises StaleArenaError if the ring is not the session's or has another shape.
        """
        if self._ring is None or self._ring.name != name:
            ring = self._attach_ring(name)
            self.close()
            self._ring = ring
            shape = (self.sizes.num_slots, self._config.block_size, self._config.draft_vocab_size)
            spec = ArenaSpec(shape, np.float32, 1, self.id, epoch, is_on_device=self._gpu is not None)
            self._draft_probs = Arena.create(spec, self._memory)
            shape = (self.sizes.num_slots, 2, self._config.block_size)
            self._blocks = Arena.create(replace(spec, shape=shape, dtype=np.float64), self._memory)
            if draft_to_target is not None:
                spec = ArenaSpec(draft_to_target.shape, np.uint32, 0, self.id, epoch)
                self._draft_to_target = Arena.create(spec)
                self._draft_to_target.rows[:] = draft_to_target
        assert self._draft_probs is not None
        assert self._blocks is not None
        to_target = self._draft_to_target.name if self._draft_to_target else ""
        return SessionArenas(self._draft_probs.name, to_target, self._blocks.name)

    def _attach_ring(self, name: str) -> Arena:
        arena = Arena.attach(name, session=self.id, device=self._memory)
        shape, width = arena.spec.shape, self._config.feature_size
        fits = len(shape) == 3 and (shape[0], shape[2]) == (self.sizes.num_slots, width) and shape[1] > 0
        dtype = np.dtype(np.float32 if self._feature_type == torch.float32 else np.uint16)
        is_here = arena.spec.is_on_device == (self._gpu is not None)
        if not fits or not is_here or np.dtype(arena.spec.dtype) != dtype or arena.spec.stamp_dims != 2:
            arena.close()
            raise StaleArenaError(
                f"feature ring {name} is {list(shape)} {np.dtype(arena.spec.dtype)}: the drafter reads "
                f"[{self.sizes.num_slots}, rows, {width}] {dtype} with one stamp a row, where it computes (set "
                "DSPARK_VERIFIER_DEVICE and DSPARK_DRAFTER_DEVICE alike)"
            )
        return arena

    @property
    def _memory(self) -> DeviceMemory | None:
        return self._gpu.memory if self._gpu else None

    @property
    def arena_names(self) -> tuple[str, ...]:
        """Of what a call on a device reads and writes besides the session's own memory."""
        return tuple(arena.name for arena in (self._ring, self._draft_probs) if arena is not None)

    @property
    def device_ring(self) -> Tensor:
        """The feature ring on a device, [num_slots · ring rows + 1, feature size]; the last row is padding's."""
        assert self._ring is not None
        ring: Tensor = self._ring.device_rows(self._feature_type)
        return ring

    @property
    def device_draft_probs(self) -> Tensor:
        """Draft distributions on a device, [num_slots, block_size, Vd]."""
        assert self._draft_probs is not None
        probs: Tensor = self._draft_probs.device_rows(torch.float32)[:-1].view(self._draft_probs.spec.shape)
        return probs

    @property
    def device_blocks(self) -> Tensor:
        """Published blocks on a device, [2 * num_slots + 1, block_size]: ids and survivals of a slot; one row spare."""
        assert self._blocks is not None
        blocks: Tensor = self._blocks.device_rows(torch.float64)
        return blocks

    def apply(self, updates: types_pb2.SlotUpdates) -> None:
        """Applies slot changes. Raises SessionMismatchError for a slot or page that is out of range."""
        self.slots.apply(updates)
        self._changed_slots.update(updates.releases, updates.page_slots, (each.slot for each in updates.admissions))

    def take_changed_slots(self) -> list[int]:
        """Slots whose pages may have changed since this was last asked."""
        changed, self._changed_slots = sorted(self._changed_slots), set()
        return changed

    def draft_probs_of(self, slot: int, round_: int, first_position: int) -> npt.NDArray[np.float32]:
        """The slot's rows of draft distributions, [block_size, Vd], stamped for this round before they are written."""
        self.stamp_draft_probs(slot, round_, first_position)
        assert self._draft_probs is not None
        rows: npt.NDArray[np.float32] = self._draft_probs.rows[slot]
        return rows

    def stamp_draft_probs(self, slot: int, round_: int, first_position: int) -> None:
        """Says of which round the slot's distributions are going to be."""
        assert self._draft_probs is not None
        self._draft_probs.stamps[slot] = np.array((self.id, round_, slot, first_position), np.uint64)

    def write_blocks(
        self, rows: DraftRows, token_ids: npt.NDArray[np.uint32], survivals: npt.NDArray[np.float64]
    ) -> None:
        """Puts blocks where a verifier finds them, [B, drafts] each; `stamp_blocks` follows."""
        assert self._blocks is not None
        self._blocks.rows[rows.slots, 0, : token_ids.shape[1]] = token_ids
        self._blocks.rows[rows.slots, 1] = 0.0
        self._blocks.rows[rows.slots, 1, : survivals.shape[1]] = survivals

    def stamp_blocks(self, rows: DraftRows) -> None:
        """Says of which round the blocks of `rows` are, once they are there: a verifier waits for that."""
        assert self._blocks is not None
        for slot, position, round_ in zip(rows.slots, rows.anchor_positions, rows.rounds, strict=True):
            self._blocks.stamps[slot] = np.array((self.id, round_, slot, position + 1), np.uint64)

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
        is_here = not self._ring.spec.is_on_device
        features = self._ring.rows[slots, ring_rows] if is_here else np.empty((0, 0), np.float32)
        return FeatureRows(features, slots * self._ring.spec.shape[1] + ring_rows, slots, positions, failures)
