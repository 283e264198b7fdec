"""What this process may use of the machine's CPUs, and what they can do."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path


def _cgroup_quota() -> float | None:
    """Cores granted by the control group (v2, then v1), or None when unlimited."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        base = Path("/sys/fs/cgroup/cpu")
        quota_us = int((base / "cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((base / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def available_cores() -> int:
    """Cores this process may use: CPU affinity capped by the container's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cores if quota is None else min(cores, math.floor(quota)))


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
