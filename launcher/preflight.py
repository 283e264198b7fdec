"""What is checked before anything is loaded: ports, run directory, leftovers of crashed runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from service_kit import handoff
from service_kit.errors import ConfigurationError

_PREFIX = "serve-"
_LOCK = "lock"
_PORT_TRIES = 50
_MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux, 104 on macOS
_LONGEST_SOCKET_NAME = "/scheduler.sock"


def check_port(host: str, port: int, option: str) -> None:
    """Raises ConfigurationError naming `option` if `host`:`port` cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port} ({error.strerror or error}): choose another {option}", field=option
        ) from error


def free_port_pair() -> int:
    """A loopback port that is free now, and so is the next one."""
    for _ in range(_PORT_TRIES):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
    raise ConfigurationError("found no two free ports in a row on 127.0.0.1")


@contextlib.contextmanager
def instance_run_dir(run_dir: Path) -> Iterator[Path]:
    """A private directory for one server's sockets, removed at the end. Leftovers of dead servers go first.

    Raises ConfigurationError if it cannot be made, or its path is too long for a socket.
    """
    instance = run_dir / f"{_PREFIX}{secrets.token_hex(4)}"
    if len(os.fsencode(f"{instance}{_LONGEST_SOCKET_NAME}")) > _MAX_SOCKET_PATH:
        raise ConfigurationError(
            f"the run directory {run_dir} is too long for Unix sockets: set DSPARK_RUN_DIR to a shorter one",
            field="DSPARK_RUN_DIR",
        )
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if run_dir.stat().st_uid != os.getuid():
            raise PermissionError(f"it belongs to user {run_dir.stat().st_uid}")
        _remove_dead_instances(run_dir)
        instance.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigurationError(
            f"cannot use the run directory {run_dir} ({error}): set DSPARK_RUN_DIR", field="DSPARK_RUN_DIR"
        ) from error
    with (instance / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield instance
        finally:
            shutil.rmtree(instance, ignore_errors=True)
            handoff.remove_orphans()


def _remove_dead_instances(run_dir: Path) -> None:
    handoff.remove_orphans()
    for instance in run_dir.glob(f"{_PREFIX}*"):
        # OSError: alive (its lock is taken), or being made or removed by another start
        with contextlib.suppress(OSError), (instance / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(instance, ignore_errors=True)
