"""Memory of a CUDA device that two processes share: one makes it and hands over 64 bytes, the other opens them.

Over the driver's own library, which every machine with a GPU has. Memory from torch's allocator would drag the whole
block that it came from into the other process.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any, NamedTuple, Protocol

from service_kit.errors import ConfigurationError, StaleArenaError

HANDLE_BYTES = 64
_OPEN_LAZILY = 1
_INTERFACE_VERSION = 3
"""Of `__cuda_array_interface__`."""


class DeviceRegion(NamedTuple):
    """Bytes on the device."""

    address: int
    num_bytes: int
    handle: bytes
    """What another process opens it with, HANDLE_BYTES long."""


class DeviceMemory(Protocol):
    """What makes, opens and gives back shared regions."""

    def create(self, num_bytes: int) -> DeviceRegion:
        """Zeroed memory. Raises ConfigurationError if there is not enough."""

    def open(self, handle: bytes, num_bytes: int) -> DeviceRegion:
        """A region of another process (or of this one). Raises StaleArenaError if its owner is gone."""

    def close(self, region: DeviceRegion) -> None:
        """Frees a region that was created, lets go of one that was opened."""

    def tensor(self, region: DeviceRegion, shape: tuple[int, ...], dtype: Any) -> Any:
        """The region as a torch tensor; valid until it is closed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaMemory:
    """Regions of the current CUDA device, in torch's own context."""

    def __init__(self, driver: Any = None) -> None:
        """`driver` stands in for libcuda in tests."""
        self._cuda: Any = driver if driver is not None else ctypes.CDLL("libcuda.so.1")
        self._own: dict[bytes, DeviceRegion] = {}
        self._holders: Counter[bytes] = Counter()
        """Of own regions: services of one process hand them to each other without opening them."""

    def create(self, num_bytes: int) -> DeviceRegion:
        """See DeviceMemory."""
        address, handle = ctypes.c_uint64(), _Handle()
        if self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)):
            raise ConfigurationError(
                f"the device cannot hold {num_bytes / 2**20:.0f} MiB more: lower max_num_seqs or the feature ring rows"
            )
        try:
            self._check(self._cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes)), "zero")
            self._check(self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), address), "share")
        except StaleArenaError:
            self._cuda.cuMemFree_v2(address)
            raise
        region = DeviceRegion(address.value, num_bytes, bytes(handle))
        self._own[region.handle] = region
        self._holders[region.handle] = 1
        return region

    def open(self, handle: bytes, num_bytes: int) -> DeviceRegion:
        """See DeviceMemory."""
        if handle in self._own:  # a process cannot open its own
            self._holders[handle] += 1
            return self._own[handle]
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        status = self._cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, ctypes.c_uint(_OPEN_LAZILY))
        self._check(status, "open")
        return DeviceRegion(address.value, num_bytes, handle)

    def close(self, region: DeviceRegion) -> None:
        """See DeviceMemory."""
        if region.handle not in self._own:
            self._check(self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(region.address)), "close")
            return
        self._holders[region.handle] -= 1
        if not self._holders[region.handle]:
            del self._own[region.handle]
            self._check(self._cuda.cuMemFree_v2(ctypes.c_uint64(region.address)), "free")

    def tensor(self, region: DeviceRegion, shape: tuple[int, ...], dtype: Any) -> Any:
        """See DeviceMemory."""
        import torch

        class Bytes:
            __cuda_array_interface__ = {  # noqa: RUF012 - the protocol's name
                "shape": (region.num_bytes,),
                "typestr": "|u1",
                "data": (region.address, False),
                "version": _INTERFACE_VERSION,
            }

        return torch.as_tensor(Bytes(), device="cuda").view(dtype).view(shape)

    def _check(self, status: int, what: str) -> None:
        if status:
            raise StaleArenaError(f"CUDA cannot {what} shared memory (error {status}; did its owner restart?)")
