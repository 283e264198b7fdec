"""Arenas whose rows are on a device: one handle goes from owner to reader, everything else is as for the others."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.gpu import FakeDeviceMemory

from service_kit.device_memory import HANDLE_BYTES, CudaMemory
from service_kit.errors import ConfigurationError, StaleArenaError
from service_kit.handoff import Arena, ArenaSpec

SPEC = ArenaSpec((3, 4, 5), np.float32, 2, session=77, epoch=5, is_on_device=True)


def test_a_reader_sees_what_the_owner_writes_and_its_stamps() -> None:
    memory = FakeDeviceMemory()
    owner = Arena.create(SPEC, memory)
    reader = Arena.attach(owner.name, session=77, device=memory)
    assert reader.spec == SPEC
    owner.device_rows(torch.float32)[7] = 3.0
    owner.stamps[1, 3] = (77, 1, 1, 9)
    assert reader.device_rows(torch.float32).shape == (13, 5)  # one row more, for padding
    assert reader.device_rows(torch.float32)[7].tolist() == [3.0] * 5
    assert reader.stamps[1, 3].tolist() == [77, 1, 1, 9]
    assert not owner.is_linked
    reader.close()
    owner.close()
    owner.close()
    assert memory.num_open == 0


def test_what_cannot_be_opened_is_refused() -> None:
    memory = FakeDeviceMemory()
    owner = Arena.create(SPEC, memory)
    with pytest.raises(StaleArenaError, match="on a GPU and this service computes on the CPU: set DSPARK_VERIFIER_DEV"):
        Arena.attach(owner.name, session=77)
    with pytest.raises(StaleArenaError, match="cannot open"):
        Arena.attach(owner.name, session=77, device=FakeDeviceMemory())
    owner.close()
    with pytest.raises(AssertionError, match="in shared memory"):
        Arena.create(replace(SPEC, is_on_device=False)).device_rows(torch.float32)


class _Driver:
    """libcuda as far as it is called."""

    def __init__(self) -> None:
        self.memory: dict[int, bytes] = {}
        self.opened: list[int] = []
        self.fails: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if status := self.fails.get(name):
                return status
            if own := vars(type(self)).get(f"_{name}"):
                own(self, *arguments)
            return 0

        return call

    def _cuMemAlloc_v2(self, address: Any, size: Any) -> None:
        number = 4096 * (1 + len(self.memory))
        self.memory[number] = bytes(size.value)
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = number

    def _cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        ctypes.memmove(handle, address.value.to_bytes(HANDLE_BYTES, "little"), HANDLE_BYTES)

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:
        number = int.from_bytes(bytes(handle), "little")
        self.opened.append(number)
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = number

    def _cuMemFree_v2(self, address: Any) -> None:
        del self.memory[address.value]

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        self.opened.remove(address.value)


def test_cuda_regions_are_shared_between_processes_by_handle() -> None:
    driver = _Driver()
    owner, reader = CudaMemory(driver), CudaMemory(driver)
    region = owner.create(1000)
    assert (region.num_bytes, len(region.handle), len(driver.memory)) == (1000, HANDLE_BYTES, 1)
    opened = reader.open(region.handle, 1000)
    assert opened.address == region.address
    assert driver.opened == [region.address]
    reader.close(opened)
    assert driver.opened == []
    same_process = owner.open(region.handle, 1000)  # CUDA refuses to open what the process itself shares
    assert same_process == region
    assert driver.opened == []
    owner.close(region)
    assert driver.memory
    owner.close(same_process)
    assert not driver.memory


def test_failures_of_the_driver_are_told() -> None:
    driver = _Driver()
    memory = CudaMemory(driver)
    driver.fails["cuMemAlloc_v2"] = 2
    with pytest.raises(ConfigurationError, match="cannot hold 3 MiB more: lower max_num_seqs"):
        memory.create(3 * 2**20)
    driver.fails = {"cuIpcGetMemHandle": 801}
    with pytest.raises(StaleArenaError, match=r"cannot share shared memory \(error 801"):
        memory.create(100)
    assert not driver.memory  # given back
    driver.fails = {"cuIpcOpenMemHandle_v2": 201}
    with pytest.raises(StaleArenaError, match=r"cannot open .* did its owner restart"):
        memory.open(b"x" * HANDLE_BYTES, 100)
