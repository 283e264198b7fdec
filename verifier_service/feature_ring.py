"""The feature ring that a session writes and the drafter reads: position p of a slot in row p % rows of the slot."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from service_kit.errors import ConfigurationError
from service_kit.gpu import Gpu
from service_kit.handoff import Arena, ArenaSpec
from verifier_service.model import TokenRows


class FeatureRing:
    """Owner of a features arena. Used on the engine thread only."""

    def __init__(
        self, session: int, epoch: int, shape: tuple[int, int, int], dtype: torch.dtype, gpu: Gpu | None
    ) -> None:
        """Zeroed rows of `shape` [num_slots, ring rows, layers * hidden], on `gpu` if there is one.

        Raises ConfigurationError if they cannot be had.
        """
        self._session, self._epoch, self._shape, self._dtype, self._gpu = session, epoch, shape, dtype, gpu
        self._create()

    def _create(self) -> None:
        value_type = np.float32 if self._dtype == torch.float32 else np.uint16
        spec = ArenaSpec(self._shape, value_type, 2, self._session, self._epoch, is_on_device=self._gpu is not None)
        try:
            self._arena = Arena.create(spec, self._gpu.memory if self._gpu else None)
        except OSError as error:
            raise ConfigurationError(str(error), field="feature_ring_rows") from error
        self._rows = self._arena.rows.reshape(-1, self._shape[-1])
        self._stamps = self._arena.stamps.reshape(-1, 4)

    @property
    def name(self) -> str:
        """Of the arena."""
        return self._arena.name

    @property
    def is_taken(self) -> bool:
        """Whether a drafter has mapped it; no second one can."""
        return not self._arena.is_linked

    @property
    def num_bytes(self) -> int:
        """Shared memory that it takes."""
        return self._arena.spec.total_bytes

    @property
    def device_rows(self) -> Tensor:
        """On a device: [num_slots * ring rows + 1, layers * hidden]; the last row is padding's."""
        rows: Tensor = self._arena.device_rows(self._dtype)
        return rows

    def renew(self) -> None:
        """A new arena in place of this one, for a new drafter."""
        self._arena.close()
        self._create()

    def write(self, step_id: int, rows: TokenRows, features: Tensor) -> None:
        """Copies the features of every computed row to its place (on a device the step itself has) and stamps it.

        `features` is [>= num_rows, layers * hidden].
        """
        slots, positions = rows.slots.numpy(), rows.positions.numpy()
        ring_rows = self._shape[1]
        places = slots.astype(np.int64) * ring_rows + positions % ring_rows
        if not self._arena.spec.is_on_device:
            self._rows[places] = features[: len(places)].numpy()
        stamps = np.empty((len(places), 4), np.uint64)
        stamps[:, 0], stamps[:, 1], stamps[:, 2], stamps[:, 3] = self._session, step_id, slots, positions
        self._stamps[places] = stamps

    def close(self) -> None:
        """Gives back its memory."""
        self._arena.close()
