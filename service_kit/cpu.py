"""What this process may use of the machine's CPUs, and what they can do."""

from __future__ import annotations

import logging
import math
import os
import platform
from pathlib import Path
from typing import NamedTuple

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


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The tightest quota of this process's control groups (v2 or v1) up to the root, in cores; None if unlimited."""
    quotas: list[float | None] = []
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        own = base / path.lstrip("/")
        quotas += [_quota_of(group) for group in (own, *own.parents) if group.is_relative_to(base)]
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


def available_memory_bytes() -> int:
    """Memory this process could still take: the machine's free memory capped by the control group's limit."""
    try:
        free = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return free if limit == "max" else min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        return free
