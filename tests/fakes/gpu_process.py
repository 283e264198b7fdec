"""An executor in a process of its own, on a GPU that is not there: device memory is files, whose handles are names.

`gpu_verifier` and `gpu_drafter` are what a launcher starts in place of the services.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fakes.gpu import fake_gpu

from service_kit.device_memory import HANDLE_BYTES, DeviceRegion
from service_kit.errors import StaleArenaError
from service_kit.executor import Executor
from service_kit.gpu import GpuFacts, choose_device
from service_kit.settings import CommonSettings, load_settings

_FACTS = GpuFacts("a GPU that is not there", (9, 0), True, 2**34, 2**34)


class FileMemory:
    """Regions that processes share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapped: dict[bytes, torch.Tensor] = {}

    def create(self, num_bytes: int) -> DeviceRegion:
        handle = secrets.token_hex(HANDLE_BYTES // 2).encode()
        (self._directory / handle.decode()).write_bytes(bytes(num_bytes))
        return self.open(handle, num_bytes)

    def open(self, handle: bytes, num_bytes: int) -> DeviceRegion:
        path = self._directory / handle.decode()
        if not path.exists():
            raise StaleArenaError("CUDA cannot open shared memory")
        self._mapped[handle] = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        return DeviceRegion(self._mapped[handle].data_ptr(), num_bytes, handle)

    def close(self, region: DeviceRegion) -> None:
        self._mapped.pop(region.handle, None)

    def tensor(self, region: DeviceRegion, shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        return self._mapped[region.handle].view(dtype).view(shape)


def run(executor: Executor, package: str) -> int:
    """The executor's exit status."""
    memory = FileMemory(load_settings(CommonSettings).run_dir)
    gpu = replace(fake_gpu(refuses_reads=False), memory=memory)
    with (
        mock.patch(f"{package}.loading.open_gpu", return_value=gpu),
        mock.patch.object(choose_device, "__defaults__", (lambda: _FACTS,)),
    ):
        return executor.main()
