"""State of one scheduler session: slots, pages, feature ring, and the others' arenas mapped into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from dspark.v1 import types_pb2
from torch import Tensor

from kernels.logit_controls.cpu import ControlledText
from kernels.sampling import SlotSampling
from service_kit.cpu import available_memory_bytes
from service_kit.engine_thread import EngineThread, StepReplies
from service_kit.errors import ConfigurationError, SessionMismatchError, StaleArenaError
from service_kit.gpu import GRAPH_BYTES, Gpu, MemoryPlan
from service_kit.handoff import Arena, ArenaSpec
from service_kit.slots import SlotTable
from verifier_service.model import PAGE_SIZE, TargetModel, TokenRows
from verifier_service.steps import Emission, StepResult


@dataclass(frozen=True)
class SessionSizes:
    """What a scheduler asks for once a session; fields as in VerifierServiceAttachRequest."""

    num_slots: int
    num_pages: int
    max_model_len: int
    max_batch_tokens: int
    feature_ring_rows: int
    max_draft_tokens: int
    feature_layer_ids: tuple[int, ...]


class DraftArenas(NamedTuple):
    """Names of the drafter's arenas; empty where there is none."""

    draft_probs: str = ""
    draft_to_target: str = ""


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
        _check_sizes(sizes, target)
        if gpu is not None:
            device_plan(sizes, target, gpu).require("kv_memory", sizes.num_pages * target.page_bytes)
        elif sizes.num_pages * target.page_bytes > available_memory_bytes():
            raise _too_large(sizes.num_pages, target.page_bytes)
        self.session, self.epoch, self.sizes, self._gpu = session, epoch, sizes, gpu
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
            raise _too_large(sizes.num_pages, target.page_bytes) from error
        self._feature_size = len(sizes.feature_layer_ids) * target.config.hidden_size
        self._draft_names = DraftArenas()
        self._draft_probs: Arena | None = None
        self.draft_to_target: npt.NDArray[np.uint32] | None = None  # [draft_vocab]
        self._masks: Arena | None = None
        self._features: Arena | None = None
        if sizes.feature_ring_rows:
            self._create_features()

    def _create_features(self) -> None:
        shape = (self.sizes.num_slots, self.sizes.feature_ring_rows, self._feature_size)
        dtype = np.float32 if self.space.features.dtype == torch.float32 else np.uint16
        spec = ArenaSpec(shape, dtype, 2, self.session, self.epoch, is_on_device=self._gpu is not None)
        try:
            self._features = Arena.create(spec, self._gpu.memory if self._gpu else None)
        except OSError as error:
            raise ConfigurationError(str(error), field="feature_ring_rows") from error
        self._ring = self._features.rows.reshape(-1, self._feature_size)
        self._ring_stamps = self._features.stamps.reshape(-1, 4)

    @property
    def arena_names(self) -> tuple[str, ...]:
        """Of what a step on a device reads and writes besides the session's own memory."""
        return (self.features_arena, self._draft_names.draft_probs, self._draft_names.draft_to_target)

    @property
    def device_ring(self) -> Tensor | None:
        """The feature ring on a device, [num_slots · ring rows + 1, feature size]; the last row is padding's."""
        if self._features is None:
            return None
        ring: Tensor = self._features.device_rows(self.space.features.dtype)
        return ring

    @property
    def device_draft_probs(self) -> Tensor | None:
        """The drafter's distributions on a device, [num_slots, block size, draft vocabulary]."""
        if self._draft_probs is None:
            return None
        probs: Tensor = self._draft_probs.device_rows(torch.float32)[:-1].view(self._draft_probs.spec.shape)
        return probs

    @property
    def features_arena(self) -> str:
        """Name of the feature ring's arena; empty without one."""
        return self._features.name if self._features else ""

    @property
    def arena_bytes(self) -> dict[str, int]:
        """Shared memory that the session owns, by arena."""
        return {"features": self._features.spec.total_bytes} if self._features else {}

    def attach_drafter(self, names: DraftArenas) -> None:
        """Maps the drafter's arenas where they are new; repeating a call changes nothing.

        A call without arenas is a drafter starting: if an earlier one took the feature ring (its name is gone), a new
        ring is made. Raises StaleArenaError for arenas that do not fit this session.
        """
        if not names.draft_probs:
            if self._features and not self._features.is_linked:
                self._drop_drafter()
                self._features.close()
                self._create_features()
            return
        if names == self._draft_names:
            return
        self._drop_drafter()
        probs = Arena.attach(names.draft_probs, session=self.session, device=self._gpu.memory if self._gpu else None)
        draft_vocab_size = probs.spec.shape[-1]
        if names.draft_to_target:
            mapping = Arena.attach(names.draft_to_target, session=self.session)
            # A copy, so that nothing outside this process can change it after the check.
            self.draft_to_target = mapping.rows.copy()
            mapping.close()
        problem = self._draft_problem(probs, draft_vocab_size)
        if problem:
            probs.close()
            self._drop_drafter()
            raise StaleArenaError(problem)
        self._draft_names, self._draft_probs = names, probs

    def _draft_problem(self, probs: Arena, draft_vocab_size: int) -> str:
        """What makes the drafter's arenas unusable, in words; empty if nothing does."""
        shape, sizes, mapping = probs.spec.shape, self.sizes, self.draft_to_target
        if probs.spec.is_on_device != (self._gpu is not None):
            return (
                "the drafter computes on the CPU and the verifier on a GPU: set DSPARK_DRAFTER_DEVICE and "
                "DSPARK_VERIFIER_DEVICE alike"
            )
        if (
            len(shape) != 3
            or shape[0] != sizes.num_slots
            or shape[1] < sizes.max_draft_tokens
            or probs.spec.stamp_dims != 1
            or np.dtype(probs.spec.dtype) != np.float32
        ):
            return (
                f"draft_probs is {list(shape)}, not stamped float32 [{sizes.num_slots}, "
                f">= {sizes.max_draft_tokens}, draft vocabulary]"
            )
        if mapping is None:
            if draft_vocab_size != self.vocab_size:
                return (
                    f"draft_probs has {draft_vocab_size} tokens, the target {self.vocab_size}, and no draft_to_target"
                )
        elif mapping.dtype != np.uint32 or mapping.shape != (draft_vocab_size,) or mapping.max() >= self.vocab_size:
            return f"draft_to_target is not {draft_vocab_size} target token ids"
        elif len(np.unique(mapping)) != draft_vocab_size:
            return "draft_to_target names a target token twice"
        return ""

    def attach_masks(self, name: str) -> None:
        """Maps the scheduler's masks where they are new. Raises StaleArenaError for an arena that does not fit."""
        if name == (self._masks.name if self._masks else ""):
            return
        self._drop_masks()
        if not name:
            return
        masks = Arena.attach(name, session=self.session)
        shape = (self.sizes.num_slots, self.sizes.max_draft_tokens + 1, -(-self.vocab_size // 32))
        if masks.spec.shape != shape or masks.spec.stamp_dims != 1 or np.dtype(masks.spec.dtype) != np.uint32:
            masks.close()
            raise StaleArenaError(f"masks are {list(masks.spec.shape)}, not stamped uint32 {list(shape)}")
        self._masks = masks

    def masks(self, slot: int, step_id: int, first_position: int, count: int) -> npt.NDArray[np.uint32]:
        """Masks of a slot's next tokens, [count, words].

        Raises StaleArenaError if they are not those of this step and position.
        """
        if self._masks is None:
            raise StaleArenaError("no masks arena is attached")
        stamp = tuple(self._masks.stamps[slot].tolist())
        wanted = (self.session, step_id, slot, first_position)
        if stamp != wanted:
            raise StaleArenaError(f"masks of slot {slot} carry (session, step, slot, position) {stamp}, not {wanted}")
        masks: npt.NDArray[np.uint32] = self._masks.rows[slot, :count]
        return masks

    def draft_probs(self, slot: int, round_: int, first_position: int, count: int) -> npt.NDArray[np.float32]:
        """Stored draft distributions of a slot's window, [count, draft_vocab], fetched if they are on a device.

        Raises StaleArenaError if they are not those of this round and position.
        """
        arena = self.require_draft_probs(slot, round_, first_position)
        on_device = self.device_draft_probs if arena.spec.is_on_device else None
        probs: npt.NDArray[np.float32] = (
            arena.rows[slot, :count] if on_device is None else on_device[slot, :count].cpu().numpy()
        )
        return probs

    def require_draft_probs(self, slot: int, round_: int, first_position: int) -> Arena:
        """The arena of draft distributions, if those of a slot are of this round and position.

        Raises StaleArenaError if they are not.
        """
        if self._draft_probs is None:
            raise StaleArenaError("no draft_probs arena is attached")
        stamp = tuple(self._draft_probs.stamps[slot].tolist())
        wanted = (self.session, round_, slot, first_position)
        if stamp != wanted:
            raise StaleArenaError(
                f"draft_probs of slot {slot} carry (session, round, slot, position) {stamp}, not {wanted}"
            )
        return self._draft_probs

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
        for slot in updates.releases:
            self._texts.pop(slot, None)
        for admission in updates.admissions:
            options = self.slots.target[admission.slot]
            self._texts.pop(admission.slot, None)
            if options is None:
                continue
            if max(options.named_ids, default=0) >= self.vocab_size:
                raise SessionMismatchError(f"slot {admission.slot}: token ids outside the vocabulary", field="target")
            if not options.controls.is_neutral:
                text = ControlledText(options.controls, options.text_ids, options.num_prompt)
                self._texts[admission.slot] = text

    def text(self, slot: int) -> ControlledText | None:
        """The text that controls a slot's logits, at least up to its anchor; None if nothing does."""
        return self._texts.get(slot)

    def take_changed_slots(self) -> list[int]:
        """Slots whose pages may have changed since this was last asked."""
        changed, self._changed_slots = sorted(self._changed_slots), set()
        return changed

    def write_features(self, step_id: int, rows: TokenRows) -> None:
        """Copies the features of every computed row into the ring (on a device the step itself has) and stamps them."""
        if self._features is None:
            return
        slots, positions = rows.slots.numpy(), rows.positions.numpy()
        places = slots.astype(np.int64) * self.sizes.feature_ring_rows + positions % self.sizes.feature_ring_rows
        if not self._features.spec.is_on_device:
            self._ring[places] = self.space.features[: len(places)].numpy()
        stamps = np.empty((len(places), 4), np.uint64)
        stamps[:, 0], stamps[:, 1], stamps[:, 2], stamps[:, 3] = self.session, step_id, slots, positions
        self._ring_stamps[places] = stamps

    def _drop_drafter(self) -> None:
        if self._draft_probs:
            self._draft_probs.close()
        self._draft_probs, self.draft_to_target, self._draft_names = None, None, DraftArenas()

    def _drop_masks(self) -> None:
        if self._masks:
            self._masks.close()
        self._masks = None

    def close(self) -> None:
        """Gives back shared memory."""
        self._drop_drafter()
        self._drop_masks()
        if self._features:
            self._features.close()
        self._features = None


def _check_sizes(sizes: SessionSizes, target: TargetModel) -> None:
    config = target.config
    for field in ("num_slots", "num_pages", "max_model_len", "max_batch_tokens"):
        if getattr(sizes, field) < 1:
            raise ConfigurationError(f"{field} must be at least 1", field=field)
    if sizes.max_model_len > config.max_position:
        raise ConfigurationError(
            f"max_model_len {sizes.max_model_len} is more than the target's context: lower it to {config.max_position}",
            field="max_model_len",
        )
    if sizes.feature_ring_rows and not sizes.feature_layer_ids:
        raise ConfigurationError("feature_ring_rows needs feature_layer_ids", field="feature_layer_ids")
    if any(layer_id >= config.num_layers for layer_id in sizes.feature_layer_ids):
        raise ConfigurationError(
            f"feature_layer_ids {list(sizes.feature_layer_ids)}: the target has layers 0 ... {config.num_layers - 1}",
            field="feature_layer_ids",
        )


def device_plan(sizes: SessionSizes, target: TargetModel, gpu: Gpu) -> MemoryPlan:
    """What a session takes of a device whose weights are loaded."""
    config, value_bytes = target.config, target.weights.embedding.element_size()
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    feature_size = len(sizes.feature_layer_ids) * config.hidden_size
    width = 3 * config.hidden_size + 2 * q_size + 2 * kv_size + 3 * config.intermediate_size + feature_size
    num_logits = min(sizes.max_batch_tokens, sizes.num_slots * (sizes.max_draft_tokens + 1))
    parts = {
        "K/V pages": sizes.num_pages * target.page_bytes,
        "step buffers": sizes.max_batch_tokens * width * value_bytes,
        "logits": num_logits * (config.vocab_size + config.hidden_size) * value_bytes,
        "feature ring": sizes.num_slots * sizes.feature_ring_rows * feature_size * value_bytes,
        "graphs": GRAPH_BYTES,
    }
    return MemoryPlan(parts, gpu.free_bytes())


def _too_large(num_pages: int, bytes_per_page: int) -> ConfigurationError:
    free = available_memory_bytes()
    return ConfigurationError(
        f"{num_pages} K/V pages need {num_pages * bytes_per_page / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free: "
        f"lower kv_memory to {int(free * 0.8) // 2**20}MiB",
        field="kv_memory",
    )
