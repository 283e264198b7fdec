"""State of one scheduler session: slots, pages, texts, and the arenas that it shares with the other services."""

from __future__ import annotations

import torch
from dspark.v1 import types_pb2
from torch import Tensor

from kernels.logit_controls.cpu import ControlledText
from kernels.sampling import SlotSampling
from service_kit.engine_thread import EngineThread, StepReplies
from service_kit.errors import SessionMismatchError
from service_kit.gpu import Gpu
from service_kit.slots import SlotTable
from verifier_service.block_source import BlockSource
from verifier_service.draft_source import DraftArenas, DraftSource
from verifier_service.feature_ring import FeatureRing
from verifier_service.mask_arena import MaskArena
from verifier_service.model import PAGE_SIZE, TargetModel
from verifier_service.session_memory import SessionSizes, plan_session
from verifier_service.steps import Emission, StepResult


class Session:
    """Memory and bookkeeping of a session. Used on the engine thread only, except `replies`."""

    def __init__(
        self,
        session: int,
        epoch: int,
        sizes: SessionSizes,
        target: TargetModel,
        engine: EngineThread,
        gpu: Gpu | None = None,
    ) -> None:
        """Allocates pages, buffers and the feature ring, on `gpu` if there is one.

        Raises ConfigurationError naming the setting to lower.
        """
        plan = plan_session(sizes, target, gpu)
        plan.settle()
        self.session, self.epoch, self.sizes = session, epoch, sizes
        self.vocab_size = target.config.vocab_size
        self.slots = SlotTable(sizes.num_slots, sizes.num_pages, sizes.max_model_len, PAGE_SIZE)
        self.page_table: Tensor = torch.from_numpy(self.slots.page_table)  # shares memory with the slot table
        self.replies: StepReplies[StepResult] = StepReplies(engine)
        self.emissions: dict[int, Emission] = {}
        """What each slot emitted in the last step."""
        self._changed_slots: set[int] = set()
        self._texts: dict[int, ControlledText] = {}
        """Of slots whose logits are controlled."""
        try:
            self.space = target.workspace(
                sizes.num_pages, sizes.max_model_len, sizes.max_batch_tokens, sizes.feature_layer_ids
            )
        except (MemoryError, RuntimeError) as error:
            raise plan.failure(error) from error
        self.drafts = DraftSource(session, sizes, self.vocab_size, gpu)
        self.blocks = BlockSource(session, sizes, gpu)
        self.masks = MaskArena(session, (sizes.num_slots, sizes.max_draft_tokens + 1, -(-self.vocab_size // 32)))
        self.ring: FeatureRing | None = None
        """None if no features are written."""
        if sizes.feature_ring_rows:
            width = len(sizes.feature_layer_ids) * target.config.hidden_size
            shape = sizes.num_slots, sizes.feature_ring_rows, width
            self.ring = FeatureRing(session, epoch, shape, self.space.features.dtype, gpu)

    @property
    def features_arena(self) -> str:
        """Name of the feature ring's arena; empty without one."""
        return self.ring.name if self.ring else ""

    @property
    def arena_names(self) -> tuple[str, ...]:
        """Of what a step on a device reads and writes besides the session's own memory."""
        return (self.features_arena, *self.drafts.names)

    @property
    def arena_bytes(self) -> dict[str, int]:
        """Shared memory that the session owns, by arena."""
        return {"features": self.ring.num_bytes} if self.ring else {}

    def attach_drafter(self, names: DraftArenas) -> None:
        """Maps the drafter's arenas where they are new; repeating a call changes nothing.

        A call without arenas is a drafter starting: if an earlier one took the feature ring (its name is gone), a new
        ring is made. Raises StaleArenaError for arenas that do not fit this session.
        """
        if names.draft_probs:
            self.drafts.attach(names)
            self.blocks.attach(names.blocks)
        elif self.ring and self.ring.is_taken:
            self.drafts.close()
            self.blocks.close()
            self.ring.renew()

    def sampling(self, slot: int) -> SlotSampling:
        """Sampling constants of an admitted slot."""
        sampling = self.slots.sampling[slot]
        if sampling is None:
            raise SessionMismatchError(f"slot {slot} is not admitted")
        return sampling

    def update_slots(self, updates: types_pb2.SlotUpdates) -> None:
        """Applies slot changes. Raises SessionMismatchError for a slot, page or token id that is out of range."""
        self.slots.apply(updates)
        self._changed_slots.update(updates.releases, updates.page_slots, (each.slot for each in updates.admissions))
        for slot in (*updates.releases, *(each.slot for each in updates.admissions)):
            self._texts.pop(slot, None)
        for admission in updates.admissions:
            options = self.slots.target[admission.slot]
            if options is not None and max(options.named_ids, default=0) >= self.vocab_size:
                raise SessionMismatchError(f"slot {admission.slot}: token ids outside the vocabulary", field="target")

    def text(self, slot: int) -> ControlledText | None:
        """On a CPU: the text that controls a slot's logits, at least up to its anchor; None if nothing does."""
        options = self.slots.target[slot]
        if options is None or options.controls.is_neutral:
            return None
        if slot not in self._texts:
            self._texts[slot] = ControlledText(options.controls, options.text_ids, options.num_prompt)
        return self._texts[slot]

    def take_changed_slots(self) -> list[int]:
        """Slots whose pages may have changed since this was last asked."""
        changed, self._changed_slots = sorted(self._changed_slots), set()
        return changed

    def close(self) -> None:
        """Gives back shared memory."""
        self.drafts.close()
        self.blocks.close()
        self.masks.close()
        if self.ring:
            self.ring.close()
        self.ring = None
