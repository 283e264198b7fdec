"""The drafter's arenas, mapped into a session: draft distributions, and what their entries are for the target."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from service_kit.errors import StaleArenaError
from service_kit.gpu import Gpu
from service_kit.handoff import Arena
from verifier_service.session_memory import SessionSizes


class DraftArenas(NamedTuple):
    """Names of the drafter's arenas; empty where there is none."""

    draft_probs: str = ""
    draft_to_target: str = ""
    blocks: str = ""
    """Read by `block_source`."""


class DraftSource:
    """Reader of the drafter's arenas; there may be none. Used on the engine thread only."""

    def __init__(self, session: int, sizes: SessionSizes, vocab_size: int, gpu: Gpu | None) -> None:
        """Nothing is mapped yet; `gpu` is what the session computes on."""
        self._session, self._sizes, self._vocab_size, self._gpu = session, sizes, vocab_size, gpu
        self.names = DraftArenas()
        """Of what is mapped."""
        self.draft_to_target: npt.NDArray[np.uint32] | None = None  # [draft_vocab]
        self._probs: Arena | None = None

    def attach(self, names: DraftArenas) -> None:
        """Maps arenas where they are new. Raises StaleArenaError, with none mapped, for some that do not fit."""
        if names == self.names:
            return
        self.close()
        probs = Arena.attach(names.draft_probs, session=self._session, device=self._gpu.memory if self._gpu else None)
        if names.draft_to_target:
            mapping = Arena.attach(names.draft_to_target, session=self._session)
            # A copy, so that nothing outside this process can change it after the check.
            self.draft_to_target = mapping.rows.copy()
            mapping.close()
        problem = self._problem(probs)
        if problem:
            probs.close()
            self.close()
            raise StaleArenaError(problem)
        self.names, self._probs = names, probs

    def _problem(self, probs: Arena) -> str:
        """What makes the arenas unusable, in words; empty if nothing does."""
        shape, sizes, mapping = probs.spec.shape, self._sizes, self.draft_to_target
        draft_vocab_size = shape[-1]
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
            if draft_vocab_size != self._vocab_size:
                return (
                    f"draft_probs has {draft_vocab_size} tokens, the target {self._vocab_size}, and no draft_to_target"
                )
        elif mapping.dtype != np.uint32 or mapping.shape != (draft_vocab_size,) or mapping.max() >= self._vocab_size:
            return f"draft_to_target is not {draft_vocab_size} target token ids"
        elif len(np.unique(mapping)) != draft_vocab_size:
            return "draft_to_target names a target token twice"
        return ""

    @property
    def device_probs(self) -> Tensor | None:
        """The distributions on a device, [num_slots, block size, draft vocabulary]; None without a drafter."""
        if self._probs is None:
            return None
        probs: Tensor = self._probs.device_rows(torch.float32)[:-1].view(self._probs.spec.shape)
        return probs

    def probs_of_window(self, slot: int, round_: int, first_position: int, count: int) -> npt.NDArray[np.float32]:
        """On a CPU: stored draft distributions of a slot's window, [count, draft_vocab].

        Raises StaleArenaError if they are not those of this round and position.
        """
        probs: npt.NDArray[np.float32] = self.require(slot, round_, first_position).rows[slot, :count]
        return probs

    def require(self, slot: int, round_: int, first_position: int) -> Arena:
        """The arena of distributions, if those of a slot are of this round and position.

        Raises StaleArenaError if they are not.
        """
        if self._probs is None:
            raise StaleArenaError("no draft_probs arena is attached")
        stamp = tuple(self._probs.stamps[slot].tolist())
        wanted = (self._session, round_, slot, first_position)
        if stamp != wanted:
            raise StaleArenaError(
                f"draft_probs of slot {slot} carry (session, round, slot, position) {stamp}, not {wanted}"
            )
        return self._probs

    def close(self) -> None:
        """Lets go of the arenas."""
        if self._probs:
            self._probs.close()
        self._probs, self.draft_to_target, self.names = None, None, DraftArenas()
