"""Runs a service so that it never outlives the launcher: `python -m launcher.child PARENT_PID RUN_DIR MODULE`.

Linux sends SIGTERM at the parent's death (prctl); a watcher thread covers other systems and services that hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import shutil
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_GRACE_S = 10.0


def _is_orphaned(parent: int) -> bool:
    return os.getppid() != parent


def _watch(parent: int) -> None:
    while not _is_orphaned(parent):
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Ties this process to its parent, then becomes the service."""
    parent, run_dir, module = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    sys.argv = [module]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if _is_orphaned(parent):
            shutil.rmtree(run_dir, ignore_errors=True)  # what the launcher would have done


if __name__ == "__main__":
    main()
