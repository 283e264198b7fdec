"""What a process takes of a GPU's memory, or of the machine's: planned before it is taken, logged, refused in words."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from service_kit.errors import ConfigurationError

_KIB, _MIB = 2**10, 2**20
_ADVISED_SHARE, _SHARE_AFTER_FAILURE = 0.98, 0.8
"""Of the free memory, what a value that is advised may need: allocators round up, and when one has failed, less."""

logger = logging.getLogger(__name__)


class Room(NamedTuple):
    """Memory that a process may still take, and all there is."""

    place: str
    """In words."""
    free_bytes: int
    total_bytes: int


class Remedy(NamedTuple):
    """A setting that can be lowered."""

    setting: str
    value: int
    """As it is."""
    least: int
    needed_bytes: Callable[[int], int]
    """Of everything a session takes, by the setting's value; ascending."""
    words: Callable[[int], str] = str
    """A value as it is set."""

    def fitting(self, free_bytes: int) -> int | None:
        """The largest value below the present one with which a session fits; None if there is none."""
        low, high = self.least - 1, self.value - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed_bytes(middle) <= free_bytes else (low, middle - 1)
        return low if low >= self.least else None


def kv_remedy(num_pages: int, least: int, page_bytes: int, needed_bytes: Callable[[int], int]) -> Remedy:
    """Lowering kv_memory, by the pages it holds; `page_bytes` is a page's in all caches that share it."""

    def words(pages: int) -> str:
        size = pages * page_bytes
        return f"{size // _MIB}MiB" if size >= 64 * _MIB else f"{-(-size // _KIB)}KiB"

    return Remedy("kv_memory", num_pages, least, needed_bytes, words)


@dataclass(frozen=True)
class MemoryPlan:
    """What one process holds and what its session will take, by what it is for, in bytes."""

    service: str
    held: Mapping[str, int]
    """Taken before the session: no longer free."""
    parts: Mapping[str, int]
    """What the session takes."""
    room: Room
    remedies: tuple[Remedy, ...]
    """The one to advise first comes first."""

    @property
    def needed_bytes(self) -> int:
        """All that the session takes."""
        return sum(self.parts.values())

    def settle(self) -> None:
        """Logs the plan. Raises ConfigurationError, naming a setting and a value that fits, if there is no room."""
        logger.info("%s", self)
        excess = self.needed_bytes - self.room.free_bytes
        if excess > 0:
            problem = f"{self.room.place} lacks {_mebibytes(excess)} MiB for a session of the {self.service}"
            raise self._refusal(problem, int(self.room.free_bytes * _ADVISED_SHARE))

    def failure(self, error: Exception) -> ConfigurationError:
        """What to raise when memory that was planned could not be had."""
        problem = f"{self.room.place} did not give the {self.service} what a session takes ({_first_line(error)})"
        return self._refusal(problem, int(min(self.room.free_bytes, self.needed_bytes) * _SHARE_AFTER_FAILURE))

    def _refusal(self, problem: str, free_bytes: int) -> ConfigurationError:
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {_mebibytes(size)}" for name, size in largest)
        problem += f" ({parts} MiB; {_mebibytes(self.room.free_bytes)} are free)"
        for remedy in self.remedies:
            if (value := remedy.fitting(free_bytes)) is not None:
                return ConfigurationError(
                    f"{problem}: lower {remedy.setting} to {remedy.words(value)}", field=remedy.setting
                )
        names = [remedy.setting for remedy in self.remedies]
        return ConfigurationError(
            f"{problem}: lower {', '.join(names[:-1])} and {names[-1]} (none is enough alone), or free memory",
            field=names[0],
        )

    def __str__(self) -> str:
        room, total = self.room, sum(self.held.values()) + self.needed_bytes
        rows = [(size, name) for name, size in {**self.held, **self.parts}.items() if size]
        rows.append((total, f"in all, {_mebibytes(self.needed_bytes)} of it for the session"))
        rows.append((room.free_bytes, f"free before the session, of {_mebibytes(room.total_bytes)}"))
        table = "".join(f"\n{_mebibytes(size):>11}  {name}" for size, name in rows)
        return f"memory of the {self.service}, {room.place}, in MiB:{table}"


def _mebibytes(num_bytes: int) -> str:
    """Rounded up, so that nothing is 0."""
    return f"{-(-num_bytes // _MIB):,}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
