"""One service as a child process: start, last log lines, bounded stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_TAIL_BYTES = 64 * 1024
_POLL_S = 0.02


class ServiceProcess:
    """A running service in its own process group, with its output in a log file."""

    def __init__(self, name: str, module: str, environment: Mapping[str, str], run_dir: Path, log_path: Path) -> None:
        """Starts `python -m module`. `environment` is all that the child sees."""
        self.name, self.log_path = name, log_path
        self._is_told = False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "launcher.child", str(os.getpid()), str(run_dir), module],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def last_lines(self) -> list[str]:
        """The end of its log."""
        return last_lines(self.log_path, 15)

    def terminate(self) -> None:
        """SIGTERM, once, without waiting. A second one would mean haste to the service."""
        if not self._is_told:
            self._is_told = True
            self._process.terminate()

    def wait_or_kill(self, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Waits for its end after `terminate`; SIGKILL to its group after `timeout_s` or once hurried."""
        deadline = time.monotonic() + timeout_s
        while self.exit_code is None and time.monotonic() < deadline and not is_hurried():
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what the service itself may have started
        self._process.wait()


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log; nothing if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
