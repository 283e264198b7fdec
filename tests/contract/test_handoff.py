"""Shared-memory arenas: the header is checked, stale and foreign arenas are refused, nothing is left behind."""

from __future__ import annotations

import _posixshmem
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from service_kit.errors import StaleArenaError
from service_kit.handoff import Arena, ArenaSpec, remove_orphans

SPEC = ArenaSpec(shape=(4, 8, 3), dtype=np.float32, stamp_dims=2, session=77, epoch=5)


def shm_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("dspark-*") if path.stat().st_uid == os.getuid()}


def test_rows_and_stamps_are_shared_and_the_name_is_gone_once_mapped() -> None:
    owner = Arena.create(SPEC)
    assert owner.name in shm_names()
    reader = Arena.attach(owner.name, session=77)
    assert owner.name not in shm_names()
    owner.rows[2, 5] = [1.0, 2.0, 3.0]
    owner.stamps[2, 5] = (77, 9, 2, 5)
    assert reader.rows[2, 5].tolist() == [1.0, 2.0, 3.0]
    assert reader.stamps[2, 5].tolist() == [77, 9, 2, 5]
    assert reader.spec == SPEC
    reader.close()
    owner.close()


def test_an_arena_of_another_session_is_refused() -> None:
    owner = Arena.create(SPEC)
    with pytest.raises(StaleArenaError, match="session 77, not 78"):
        Arena.attach(owner.name, session=78)
    owner.close()


def test_a_missing_arena_is_refused() -> None:
    with pytest.raises(StaleArenaError, match="does not exist"):
        Arena.attach("dspark-0123456789abcdef", session=77)


@pytest.mark.parametrize("name", ["etc-passwd", "dspark-../etc", "/dspark-x"])
def test_names_that_are_not_ours_are_refused(name: str) -> None:
    with pytest.raises(StaleArenaError, match="not the name"):
        Arena.attach(name, session=77)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, b"X", "foreign header"), (8, b"\xff", "foreign header"), (24, b"\x09", "header says")],
)
def test_a_broken_header_is_refused(offset: int, value: bytes, message: str) -> None:
    owner = Arena.create(SPEC)
    owner._memory[offset : offset + len(value)] = value
    with pytest.raises(StaleArenaError, match=message):
        Arena.attach(owner.name, session=77)
    owner.close()


def test_an_object_without_a_header_is_refused() -> None:
    file = _posixshmem.shm_open("/dspark-feedfeedfeedfeed", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(file, 16)
    try:
        with pytest.raises(StaleArenaError, match="no header"):
            Arena.attach("dspark-feedfeedfeedfeed", session=77)
    finally:
        _posixshmem.shm_unlink("/dspark-feedfeedfeedfeed")
        os.close(file)


def test_a_full_shared_memory_says_what_to_lower() -> None:
    huge = ArenaSpec(shape=(1 << 20, 1 << 20), dtype=np.float32, stamp_dims=0, session=1, epoch=1)
    before = shm_names()
    with pytest.raises(OSError, match="lower max_num_seqs"):
        Arena.create(huge)
    assert shm_names() == before


def test_what_a_killed_owner_left_is_found_by_its_free_lock() -> None:
    code = (
        "import numpy as np, os, signal\n"
        "from service_kit.handoff import Arena, ArenaSpec\n"
        "arena = Arena.create(ArenaSpec((2, 2), np.float32, 1, 1, 1))\n"
        "print(arena.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    name = killed.stdout.strip()
    assert name in shm_names()
    living = Arena.create(SPEC)
    removed = remove_orphans()
    assert name in removed
    assert living.name not in removed
    assert name not in shm_names()
    living.close()
