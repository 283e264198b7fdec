"""Plays the scheduler and the verifier to a drafter: admissions, pages, the feature ring, and calls in-process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dspark.v1 import drafter_pb2, types_pb2
from safetensors.numpy import load_file, save_file

from drafter_service.engine import DrafterEngine
from drafter_service.loading import load_drafter
from drafter_service.model import BlockForward
from drafter_service.server import DrafterServicer
from drafter_service.settings import DrafterSettings
from kernels.sampling import Regime
from service_kit.engine_thread import EngineThread
from service_kit.handoff import Arena, ArenaSpec

GOLDEN = Path(__file__).parent / "golden"
VANILLA_DRAFTER, TARGET = GOLDEN / "draft_vanilla", GOLDEN / "target"
Tensors = dict[str, np.ndarray]
SESSION = 2**63 + 11  # does not fit a signed integer


def make_checkpoint(
    directory: Path, changes: dict[str, Any], edit: Callable[[Tensors], None] = lambda tensors: None
) -> Path:
    """The vanilla golden drafter with configuration changes and edited tensors."""
    directory.mkdir()
    config = json.loads((VANILLA_DRAFTER / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(VANILLA_DRAFTER / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


class DrafterHarness:
    """One engine with one attached session. `epoch` and `step_id` follow the contract unless a test overrides them."""

    def __init__(
        self,
        drafter: Path,
        target: Path,
        *,
        num_slots: int = 4,
        num_pages: int = 16,
        max_model_len: int = 128,
        ring_rows: int = 64,
        weight_format: Any = "float32",
        kernels: Any = "auto",
    ) -> None:
        self.thread = EngineThread("drafter-test")
        settings = DrafterSettings(
            model=str(drafter), target=str(target), weight_format=weight_format, kernels=kernels, threads=1
        )
        loaded = self.thread.submit(lambda: load_drafter(settings)).result()
        self.model = loaded.model
        self.servicer = DrafterServicer(DrafterEngine(loaded, self.thread))
        self.sizes = {"num_slots": num_slots, "num_pages": num_pages, "max_model_len": max_model_len}
        self.ring_rows = ring_rows
        self.step_id = 0
        self.last_forward: BlockForward
        self._record_forwards()
        self.new_ring(SESSION)
        self.info = self.attach()
        self.draft_probs = Arena.attach(self.info.draft_probs_arena, session=SESSION)
        self._updates = types_pb2.SlotUpdates()

    def __enter__(self) -> DrafterHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.servicer.close()
        self.thread.stop()
        self.draft_probs.close()
        self.ring.close()

    def _record_forwards(self) -> None:
        forward_block = self.model.forward_block

        def recording(*args: Any) -> BlockForward:
            forward = forward_block(*args)
            self.last_forward = BlockForward(forward.hidden.clone(), forward.base_logits.clone())
            return forward

        self.model.forward_block = recording  # type: ignore[method-assign]

    def new_ring(self, session: int) -> None:
        shape = (self.sizes["num_slots"], self.ring_rows, self.model.config.feature_size)
        self.ring = Arena.create(ArenaSpec(shape, np.float32, 2, session, epoch=1))

    def attach(self, session: int = SESSION) -> drafter_pb2.DrafterServiceAttachResponse:
        request = drafter_pb2.DrafterServiceAttachRequest(session=session, features_arena=self.ring.name, **self.sizes)
        return self.servicer.Attach(request)

    def admit(self, slot: int, regime: Regime, pages: Sequence[int], temperature: float = 1.0, key: int = 7) -> None:
        """Sent with the next call."""
        self._updates.admissions.add(slot=slot, regime=int(regime), temperature=temperature, top_p=1.0, key=key)
        for index, page in enumerate(pages):
            self._updates.page_slots.append(slot)
            self._updates.page_indices.append(index)
            self._updates.page_ids.append(page)

    def write_features(self, slot: int, start: int, features: np.ndarray, step_id: int) -> None:
        for position, row in enumerate(features, start):
            self.ring.rows[slot, position % self.ring_rows] = row
            stamp = np.array((SESSION, step_id, slot, position), np.uint64)
            self.ring.stamps[slot, position % self.ring_rows] = stamp

    def draft(
        self,
        *,
        ingests: Sequence[tuple[int, int, int, int, int]] = (),
        rows: Sequence[tuple[int, int, int, int]] = (),
        num_drafts: int = 0,
        **overrides: Any,
    ) -> drafter_pb2.DraftResponse:
        """ingests: (slot, start, count, oldest step, newest step); rows: (slot, anchor id, anchor position, round)."""
        self.step_id += 1
        fields = {"session": SESSION, "epoch": self.info.epoch, "step_id": self.step_id} | overrides
        request = drafter_pb2.DraftRequest(slots=self._updates, num_draft_tokens=num_drafts, **fields)
        for slot, start, count, oldest, newest in ingests:
            request.ingest_slots.append(slot)
            request.ingest_starts.append(start)
            request.ingest_counts.append(count)
            request.ingest_oldest_step_ids.append(oldest)
            request.ingest_newest_step_ids.append(newest)
        for slot, anchor_id, anchor_position, round_ in rows:
            request.row_slots.append(slot)
            request.row_anchor_ids.append(anchor_id)
            request.row_anchor_positions.append(anchor_position)
            request.row_rounds.append(round_)
        self._updates = types_pb2.SlotUpdates()
        return self.servicer.Draft(request)
