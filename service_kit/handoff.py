"""Shared-memory arenas: tensors that cross process boundaries without being copied into messages.

An arena is one POSIX shared-memory object: a checked header, an optional stamp of four 64-bit integers per row
(session, step or round, slot, position), then the raw rows. Nothing but bytes; nothing is unpickled. The rows may be on
a CUDA device instead: then the object ends with the handle that opens them, and one row more lies behind them there, to
which the padding of a captured step writes.

Life of an arena: the owner creates it (mode 0600) and holds a file lock on it while alive; the reader maps it by name
and unlinks the name at once, so a crash later leaves nothing behind. What a crash between the two leaves is found by
its free lock (`remove_orphans`).
"""

from __future__ import annotations

import _posixshmem
import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from service_kit.device_memory import HANDLE_BYTES, DeviceMemory, DeviceRegion
from service_kit.errors import StaleArenaError

_MAGIC = b"DSPARK\x00A"
_VERSION = 1
_HEADER = struct.Struct("<8sIIII4QQQI")  # magic, version, dtype, ndim, stamp_dims, shape, session, epoch, is_on_device
_HEADER_BYTES = 128
_DTYPES: tuple[npt.DTypeLike, ...] = (np.float32, np.float16, np.uint32, np.uint16, np.float64)
"""uint16 carries bfloat16 bits."""
_PREFIX = "dspark-"
_SHM_DIR = Path("/dev/shm")

STAMP_WORDS = 4
KEEPS_STORE_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether a process that sees a new stamp sees the rows that were written before it; elsewhere only after a message."""


@dataclass(frozen=True)
class ArenaSpec:
    """What the two sides must agree on."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    stamp_dims: int
    """Leading dimensions that index stamped rows; 0 for no stamps."""
    session: int
    epoch: int
    """Epoch of the owner."""
    is_on_device: bool = False

    @property
    def stamp_shape(self) -> tuple[int, ...]:
        """Shape of the stamps, [..., 4]; empty without stamps."""
        return (*self.shape[: self.stamp_dims], STAMP_WORDS) if self.stamp_dims else (0, STAMP_WORDS)

    @property
    def stamp_bytes(self) -> int:
        """Bytes of the stamp region."""
        return int(np.prod(self.stamp_shape)) * 8

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows, with the spare one on a device."""
        num_values = int(np.prod(self.shape)) + (self.shape[-1] if self.is_on_device else 0)
        return num_values * np.dtype(self.dtype).itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole object in shared memory."""
        return _HEADER_BYTES + self.stamp_bytes + (HANDLE_BYTES if self.is_on_device else self.row_bytes)


class Arena:
    """A mapped arena. `stamps` and (unless they are on a device) `rows` are views of shared memory."""

    rows: npt.NDArray[Any]
    stamps: npt.NDArray[np.uint64]

    def __init__(
        self,
        name: str,
        spec: ArenaSpec,
        file: int,
        memory: mmap.mmap,
        device: DeviceMemory | None = None,
        region: DeviceRegion | None = None,
    ) -> None:
        """Use `create` or `attach`."""
        self.name, self.spec = name, spec
        self._file, self._memory = file, memory
        self._device, self._region = device, region
        stamps = np.frombuffer(memory, np.uint64, spec.stamp_bytes // 8, _HEADER_BYTES)
        self.stamps = stamps.reshape(spec.stamp_shape)
        num_values = 0 if region else int(np.prod(spec.shape))
        rows = np.frombuffer(memory, spec.dtype, num_values, _HEADER_BYTES + spec.stamp_bytes)
        self.rows = rows if region else rows.reshape(spec.shape)

    def device_rows(self, dtype: Any) -> Any:
        """The rows of an arena on a device, [product of all dimensions but the last, + 1, last], the spare one last.

        `dtype` is torch's name of the values' type.
        """
        assert self._device is not None, "the rows are in shared memory"
        assert self._region is not None
        shape = (int(np.prod(self.spec.shape[:-1])) + 1, self.spec.shape[-1])
        return self._device.tensor(self._region, shape, dtype)

    @classmethod
    def create(cls, spec: ArenaSpec, device: DeviceMemory | None = None) -> Arena:
        """Creates a zeroed arena, its rows on `device` if the spec says so.

        Raises OSError when shared memory is full (naming the size), ConfigurationError when the device is.
        """
        if not 1 <= len(spec.shape) <= 4:
            raise ValueError(f"an arena has 1 to 4 dimensions, not {len(spec.shape)}")
        name = f"{_PREFIX}{secrets.token_hex(8)}"
        file = _posixshmem.shm_open(f"/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                os.posix_fallocate(file, 0, spec.total_bytes)  # fail now, not with SIGBUS at the first touch
            except OSError as error:
                raise OSError(
                    f"shared memory cannot hold {spec.total_bytes / 2**20:.0f} MiB more: lower max_num_seqs or the "
                    "feature ring rows, or enlarge /dev/shm (shm_size in a container)"
                ) from error
            memory = mmap.mmap(file, spec.total_bytes)
            region = device.create(spec.row_bytes) if device is not None and spec.is_on_device else None
        except BaseException:
            os.close(file)
            _posixshmem.shm_unlink(f"/{name}")
            raise
        shape = (*spec.shape, 0, 0, 0)[:4]
        dtype = [np.dtype(known) for known in _DTYPES].index(np.dtype(spec.dtype))
        if region is not None:
            memory[-HANDLE_BYTES:] = region.handle
        kind = dtype, len(spec.shape), spec.stamp_dims
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, *kind, *shape, spec.session, spec.epoch, spec.is_on_device)
        return cls(name, spec, file, memory, device, region)

    @classmethod
    def attach(cls, name: str, *, session: int, device: DeviceMemory | None = None) -> Arena:
        """Maps an existing arena and unlinks its name; `device` opens rows that are on one.

        Raises StaleArenaError if it does not exist, is not ours, has a broken header or another session, or has its
        rows on a device that this process does not use.
        """
        if not name.startswith(_PREFIX) or "/" in name:
            raise StaleArenaError(f"{name!r} is not the name of an arena")
        try:
            file = _posixshmem.shm_open(f"/{name}", os.O_RDWR, 0o600)
        except OSError as error:
            raise StaleArenaError(f"arena {name} does not exist (its owner restarted?)") from error
        try:
            status = os.fstat(file)
            if status.st_uid != os.getuid():
                raise StaleArenaError(f"arena {name} belongs to user {status.st_uid}: run the services as one user")
            if status.st_size < _HEADER_BYTES:
                raise StaleArenaError(f"arena {name} has no header")
            memory = mmap.mmap(file, status.st_size)
            magic, version, dtype, ndim, stamp_dims, *words = _HEADER.unpack_from(memory)
            *shape, owner_session, epoch, on_device = words
            if magic != _MAGIC or version != _VERSION or dtype >= len(_DTYPES) or ndim > 4 or stamp_dims > ndim:
                raise StaleArenaError(f"arena {name} has a foreign header")
            if owner_session != session:
                raise StaleArenaError(f"arena {name} is of session {owner_session}, not {session}")
            spec = ArenaSpec(
                tuple(shape[:ndim]), _DTYPES[dtype], stamp_dims, owner_session, epoch, is_on_device=bool(on_device)
            )
            if spec.total_bytes != status.st_size:
                raise StaleArenaError(f"arena {name} is {status.st_size} bytes, its header says {spec.total_bytes}")
            region = None
            if spec.is_on_device:
                if device is None:
                    raise StaleArenaError(
                        f"the rows of arena {name} are on a GPU and this service computes on the CPU: set "
                        "DSPARK_VERIFIER_DEVICE and DSPARK_DRAFTER_DEVICE alike"
                    )
                region = device.open(bytes(memory[-HANDLE_BYTES:]), spec.row_bytes)
        except BaseException:
            os.close(file)
            raise
        arena = cls(name, spec, file, memory, device, region)
        arena.unlink()
        return arena

    @property
    def is_linked(self) -> bool:
        """Whether the name still leads to an arena: for the owner, whether no reader has mapped it yet."""
        try:
            os.close(_posixshmem.shm_open(f"/{self.name}", os.O_RDWR, 0o600))
        except FileNotFoundError:
            return False
        return True

    def unlink(self) -> None:
        """Removes the name; the mapping stays. Harmless if already removed."""
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(f"/{self.name}")

    def close(self) -> None:
        """Drops the views, the name and the descriptor. Memory is freed when the last view elsewhere goes."""
        self.unlink()
        self.rows = np.empty(0, self.spec.dtype)
        self.stamps = np.empty((0, STAMP_WORDS), np.uint64)
        if self._device is not None and self._region is not None:
            self._device.close(self._region)
            self._region = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def remove_orphans() -> list[str]:
    """Unlinks this user's arenas whose owner is gone (its lock is free). Returns their names. Linux only."""
    removed: list[str] = []
    if not _SHM_DIR.is_dir():
        return removed
    for path in _SHM_DIR.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(file)
    return removed
