"""What this process may use of the machine's CPUs, and what they can do."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from service_kit.memory_plan import Room

_CGROUPS, _MEMBERSHIP, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
_MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
"""Files of control groups, v2 and v1."""

logger = logging.getLogger(__name__)


class Cores(NamedTuple):
    """What this process may use of the machine's cores."""

    affinity: int
    """Cores that the scheduler may put it on."""
    quota: float | None
    """Cores' worth of time that its control groups grant; None when unlimited."""

    @property
    def usable(self) -> int:
        """Whole cores, at least 1: a thread more would be stopped for a part of every period."""
        return max(1, self.affinity if self.quota is None else min(self.affinity, math.floor(self.quota)))

    def __str__(self) -> str:
        limit = "no quota" if self.quota is None else f"quota {self.quota:g}"
        return f"affinity {self.affinity}, {limit}"


def cores() -> Cores:
    """CPU affinity and the control groups' quota, as they are now."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cores(affinity, _cgroup_quota())


def available_cores() -> int:
    """Cores this process may use: CPU affinity capped by the container's quota, at least 1."""
    return cores().usable


def choose_threads(wanted: int, setting: str) -> int:
    """Threads for tensor work: `wanted`, but no more than there are cores for; 0 wants every core.

    More threads than cores only take turns, so a larger number is lowered, with one warning that names the setting.
    """
    have = cores()
    if wanted <= have.usable:
        return wanted or have.usable
    logger.warning(
        "%s is %d, this process may use %d cores (%s): using %d", setting, wanted, have.usable, have, have.usable
    )
    return have.usable


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Directories of this process's control groups (v2 or v1) that may limit what `controller` does, up to the root."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        own = base / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(base))


def _cgroup_quota(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """The tightest quota of this process's control groups, in cores; None if unlimited."""
    quotas = map(_quota_of, _groups("cpu", root, membership))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    words = " ".join(_lines(group / "cpu.max")).split()  # v2: quota (or "max") and period
    if not words:
        words = [line for name in ("cfs_quota_us", "cfs_period_us") for line in _lines(group / f"cpu.{name}")]
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def cpu_name() -> str:
    """Processor name with family, model and stepping where known: part of every measurement's fingerprint."""
    try:
        fields = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
            if key.strip() in ("model name", "cpu family", "model", "stepping")
        }
    except OSError:
        fields = {}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return f"{fields['model name']} {fields.get('cpu family')}/{fields.get('model')}/{fields.get('stepping')}"


def memory_room(meminfo: Path = _MEMINFO, root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> Room:
    """Memory this process could still take, shared memory included: the machine's, or less where a control group's
    limit is tighter."""
    fields = dict(line.split(":", 1) for line in _lines(meminfo) if ":" in line)
    try:
        free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (KeyError, ValueError):
        free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rooms = [Room("this machine", free, total)]
    for group in _groups("memory", root, membership):
        limit, used = (_number(group, *names) for names in (_MEMORY_LIMITS, _MEMORY_USED))
        if limit is not None and used is not None and limit < total:
            free_of_group = min(limit, max(0, limit - used + _file_cache_bytes(group)))
            rooms.append(Room(f"this container (control group {group.name or '/'})", free_of_group, limit))
    return min(rooms, key=lambda room: room.free_bytes)


def available_memory_bytes() -> int:
    """What of `memory_room` is free."""
    return memory_room().free_bytes


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files that holds one."""
    lines = [line for name in names for line in _lines(group / name)[:1]]
    return next((int(line) for line in lines if line.strip().isdigit()), None)


def _file_cache_bytes(group: Path) -> int:
    """Pages of files that the group is charged for and gives up when memory gets short."""
    fields = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat") if " " in line)
    kinds = ("inactive_file", "active_file")
    return sum(int(fields.get(f"total_{kind}", fields.get(kind, 0))) for kind in kinds)
