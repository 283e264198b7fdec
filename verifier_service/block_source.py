"""The drafter's blocks arena, mapped into a session: drafts and survivals that no scheduler has passed on.

The drafter stamps a block once it is written, so a step may be asked for while it is still drafted: it waits for the
stamps of this very round.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from service_kit.errors import StaleArenaError
from service_kit.gpu import Gpu
from service_kit.handoff import Arena
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import Ints

_POLL_S = 50e-6
_TIMEOUT_S = 120.0
"""As long as a scheduler waits for a Draft call by default; one that fails ends the session, and with it the wait."""


class BlockSource:
    """Reader of a blocks arena; there may be none. Used on the engine thread only, except `wait`."""

    def __init__(self, session: int, sizes: SessionSizes, gpu: Gpu | None) -> None:
        """Nothing is mapped yet; `gpu` is what the session computes on."""
        self._session, self._sizes, self._gpu = session, sizes, gpu
        self._arena: Arena | None = None

    def attach(self, name: str) -> None:
        """Maps the arena where it is new. Raises StaleArenaError, with none mapped, for one that does not fit."""
        if name == (self._arena.name if self._arena else ""):
            return
        self.close()
        if not name:
            return
        arena = Arena.attach(name, session=self._session, device=self._gpu.memory if self._gpu else None)
        spec, shape, sizes = arena.spec, arena.spec.shape, self._sizes
        fits = len(shape) == 3 and shape[:2] == (sizes.num_slots, 2) and shape[2] >= sizes.max_draft_tokens
        is_here = spec.is_on_device == (self._gpu is not None)
        if not fits or not is_here or spec.stamp_dims != 1 or np.dtype(spec.dtype) != np.float64:
            arena.close()
            raise StaleArenaError(
                f"blocks are {list(shape)}, not stamped float64 [{sizes.num_slots}, 2, >= {sizes.max_draft_tokens}] "
                "where the target computes"
            )
        self._arena = arena

    def wait(self, windows: Ints, is_over: Callable[[], bool]) -> None:
        """Returns once the blocks of `windows` are there (see `are_there`), or when they will not come any more."""
        stamps, deadline = self._stamps, time.monotonic() + _TIMEOUT_S
        while not _match(stamps, self._session, windows).all() and not is_over() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def are_there(self, windows: Ints) -> npt.NDArray[np.bool_]:
        """[N] whether the block of each slot, round and position of the first draft is there; `windows`: [N, 3]."""
        return _match(self._stamps, self._session, windows)

    @property
    def device_rows(self) -> Tensor | None:
        """Blocks on a device, [2 * num_slots + 1, block size] float64: ids and survivals of each slot, and a spare row;
        None without a drafter."""
        if self._arena is None:
            return None
        rows: Tensor = self._arena.device_rows(torch.float64)
        return rows

    def read(self, slots: Ints) -> npt.NDArray[np.float64]:
        """Blocks of slots on the host, [N, 2, block size]: target token ids, then survivals."""
        assert self._arena is not None
        blocks: npt.NDArray[np.float64] = self._arena.rows[slots]
        return blocks

    @property
    def _stamps(self) -> npt.NDArray[np.uint64]:
        return self._arena.stamps if self._arena else np.zeros((self._sizes.num_slots, 4), np.uint64)

    def close(self) -> None:
        """Lets go of the arena."""
        if self._arena:
            self._arena.close()
        self._arena = None


def _match(stamps: npt.NDArray[np.uint64], session: int, windows: Ints) -> npt.NDArray[np.bool_]:
    slots, rounds, positions = windows.T
    wanted = np.stack((np.full_like(slots, session), rounds, slots, positions), axis=1).astype(np.uint64)
    result: npt.NDArray[np.bool_] = (stamps[slots] == wanted).all(axis=1)
    return result
