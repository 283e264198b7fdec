"""What a process may use of the machine: control groups, affinity, and threads chosen from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service_kit import cpu
from service_kit.cpu import Cores, choose_threads


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({}, "0::/\n", None),
        ({"cpu.max": "150000 100000"}, "0::/\n", 1.5),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 3.0),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "50000 25000"}, "0::/a/b\n", 2.0),
        ({"other/cpu.max": "100000 100000"}, "0::/a\n", None),
        ({"cpu.max": "200000 100000"}, "0::/not/visible/here\n", 2.0),
        (
            {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/a\n3:memory:/b\n0::/\n",
            2.5,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", None),
    ],
)
def test_quota_of_the_control_groups(
    tmp_path: Path, files: dict[str, str], membership: str, quota: float | None
) -> None:
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    write(tmp_path / "self", membership)
    assert cpu._cgroup_quota(tmp_path / "cgroup", tmp_path / "self") == quota


@pytest.mark.parametrize(
    ("cores", "usable"), [(Cores(8, None), 8), (Cores(8, 2.9), 2), (Cores(2, 4.0), 2), (Cores(4, 0.5), 1)]
)
def test_whole_cores_within_affinity_and_quota(cores: Cores, usable: int) -> None:
    assert cores.usable == usable


@pytest.mark.parametrize(("wanted", "chosen"), [(0, 2), (1, 1), (2, 2), (3, 2), (64, 2)])
def test_threads_above_the_quota_are_lowered_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wanted: int, chosen: int
) -> None:
    monkeypatch.setattr(cpu, "cores", lambda: Cores(8, 2.5))
    assert choose_threads(wanted, "DSPARK_VERIFIER_THREADS") == chosen
    expected = f"DSPARK_VERIFIER_THREADS is {wanted}, this process may use 2 cores (affinity 8, quota 2.5): using 2"
    assert caplog.messages == ([expected] if wanted > 2 else [])


_MEMINFO = "MemTotal:        8192 kB\nMemFree:          100 kB\nMemAvailable:    6144 kB\n"
_KIB = 1024


@pytest.mark.parametrize(
    ("files", "membership", "free_kib", "total_kib"),
    [
        ({}, "0::/\n", 6144, 8192),
        ({"memory.max": "max", "memory.current": "100"}, "0::/\n", 6144, 8192),
        ({"memory.max": str(4096 * _KIB), "memory.current": str(1024 * _KIB)}, "0::/\n", 3072, 4096),
        (
            {
                "a/memory.max": str(4096 * _KIB),
                "a/memory.current": str(4000 * _KIB),
                "a/memory.stat": f"anon 5\ninactive_file {500 * _KIB}\nactive_file {404 * _KIB}\n",
                "a/b/memory.max": "max",
                "a/b/memory.current": "0",
            },
            "0::/a/b\n",
            1000,
            4096,
        ),
        (
            {
                "memory/a/memory.limit_in_bytes": str(2048 * _KIB),
                "memory/a/memory.usage_in_bytes": str(1024 * _KIB),
                "memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {24 * _KIB}\n",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/memory.usage_in_bytes": "1",
            },
            "5:memory:/a\n4:cpu:/b\n0::/\n",
            1048,
            2048,
        ),
    ],
)
def test_memory_within_the_control_groups(
    tmp_path: Path, files: dict[str, str], membership: str, free_kib: int, total_kib: int
) -> None:
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    write(tmp_path / "self", membership)
    write(tmp_path / "meminfo", _MEMINFO)
    room = cpu.memory_room(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "self")
    assert (room.free_bytes, room.total_bytes) == (free_kib * _KIB, total_kib * _KIB)
    assert room.place.startswith("this machine" if total_kib == 8192 else "this container")
