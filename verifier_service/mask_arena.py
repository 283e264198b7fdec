"""The scheduler's token masks, mapped into a session."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from service_kit.errors import StaleArenaError
from service_kit.handoff import Arena


class MaskArena:
    """Reader of a masks arena; there may be none. Used on the engine thread only."""

    def __init__(self, session: int, shape: tuple[int, int, int]) -> None:
        """Nothing is mapped yet; `shape` is what an arena must have, [num_slots, max_draft_tokens + 1, words]."""
        self._session, self._shape = session, shape
        self._arena: Arena | None = None

    def attach(self, name: str) -> None:
        """Maps an arena where it is new; an empty name maps none. Raises StaleArenaError for one that does not fit."""
        if name == (self._arena.name if self._arena else ""):
            return
        self.close()
        if not name:
            return
        arena = Arena.attach(name, session=self._session)
        spec = arena.spec
        if spec.shape != self._shape or spec.stamp_dims != 1 or np.dtype(spec.dtype) != np.uint32:
            arena.close()
            raise StaleArenaError(f"masks are {list(spec.shape)}, not stamped uint32 {list(self._shape)}")
        self._arena = arena

    def of_window(self, slot: int, step_id: int, first_position: int, count: int) -> npt.NDArray[np.uint32]:
        """Masks of a slot's next tokens, [count, words].

        Raises StaleArenaError if they are not those of this step and position.
        """
        if self._arena is None:
            raise StaleArenaError("no masks arena is attached")
        stamp = tuple(self._arena.stamps[slot].tolist())
        wanted = (self._session, step_id, slot, first_position)
        if stamp != wanted:
            raise StaleArenaError(f"masks of slot {slot} carry (session, step, slot, position) {stamp}, not {wanted}")
        masks: npt.NDArray[np.uint32] = self._arena.rows[slot, :count]
        return masks

    def close(self) -> None:
        """Lets go of the arena."""
        if self._arena:
            self._arena.close()
        self._arena = None
