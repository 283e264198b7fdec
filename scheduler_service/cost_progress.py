"""How far measuring has got, told through the log: what `dspark serve` shows while it waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

_WORDS = "measuring what steps cost, once for this engine: "

log = logging.getLogger(__name__)


def log_progress() -> Callable[[float], None]:
    """A function that logs the share done, 0 to 1, in steps of a tenth."""
    told = -1

    def tell(share: float) -> None:
        nonlocal told
        if int(10 * share) > told:
            told = int(10 * share)
            log.info("%s%d %%", _WORDS, 10 * told)

    return tell


def progress_in(lines: Sequence[str]) -> str:
    """What the last line of a log tells about it; empty if it tells of something else."""
    last = lines[-1] if lines else ""
    return last[last.index(_WORDS) :] if _WORDS in last else ""
