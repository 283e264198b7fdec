"""Stands in for a GPU where there is none: Triton's interpreter on this process's memory, to try the scripts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from service_kit.device_memory import CudaMemory
from service_kit.gpu import Gpu


class EagerRunner:
    """Runs work when it is replayed."""

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """See GraphRunner."""

        def replay() -> None:
            work()

        return replay

    def synchronize(self) -> None:
        """Nothing runs beside the caller."""


def interpreted_gpu() -> Gpu:
    """Shares no memory with other processes."""
    return Gpu(
        torch.device("cpu"), "no GPU: Triton's interpreter", EagerRunner(), CudaMemory(driver=object()), lambda: (0, 0)
    )
