"""A GPU that is not there: its memory is this process's, its graphs call again what they recorded."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from service_kit.device_memory import HANDLE_BYTES, DeviceRegion
from service_kit.errors import StaleArenaError
from service_kit.gpu import Gpu

_READS_VALUES = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero")
"""Operations that wait for the device's values: a stream that is being captured refuses them."""


class _Capturing(TorchDispatchMode):
    """Refuses what a capture refuses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.__name__ for name in _READS_VALUES):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func.__name__}")
        return func(*args, **(kwargs or {}))


class FakeGraphRunner:
    """Records functions; counts what was recorded and replayed."""

    def __init__(self, *, refuses_reads: bool = True) -> None:
        """In Triton's interpreter kernels read memory as values: `refuses_reads` is then False."""
        self.num_recorded = self.num_replayed = 0
        self._refuses_reads = refuses_reads

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        if self._refuses_reads:
            with _Capturing():
                work()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay

    def synchronize(self) -> None:
        pass


class FakeDeviceMemory:
    """Regions by handle, as processes of one machine would see them."""

    def __init__(self) -> None:
        self._regions: dict[bytes, torch.Tensor] = {}
        self.num_open = 0

    def create(self, num_bytes: int) -> DeviceRegion:
        handle = secrets.token_bytes(HANDLE_BYTES)
        self._regions[handle] = torch.zeros(num_bytes, dtype=torch.uint8)
        return self.open(handle, num_bytes)

    def open(self, handle: bytes, num_bytes: int) -> DeviceRegion:
        if handle not in self._regions:
            raise StaleArenaError("CUDA cannot open shared memory")
        self.num_open += 1
        return DeviceRegion(self._regions[handle].data_ptr(), num_bytes, handle)

    def close(self, region: DeviceRegion) -> None:
        self.num_open -= 1

    def tensor(self, region: DeviceRegion, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        return self._regions[region.handle].view(dtype).view(shape)


def fake_gpu(*, free_bytes: int = 2**34, refuses_reads: bool = True) -> Gpu:
    """Computes on the CPU."""
    runner = FakeGraphRunner(refuses_reads=refuses_reads)
    return Gpu(torch.device("cpu"), "a GPU that is not there", runner, FakeDeviceMemory(), lambda: (free_bytes, 2**35))
