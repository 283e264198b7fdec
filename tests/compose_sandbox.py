"""Containers of a compose file as processes: the same commands, environments, users, volumes and limits, no images.

Each gets a root file system of its own (the machine's /usr, this environment as /opt/venv, what the Dockerfile copies),
read-only but for its tmpfs and volumes; its user without capabilities; a network of its own with nothing but loopback;
and the IPC namespace and /dev/shm of the service that it names. Needs root.

What stands for something else: the source lies where it lies here and not in /app, so that compiled kernels are found;
services do not reach each other by network (they need not).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from compose_file import ROOT, copied_paths, image_environment, size_bytes

_TOOLS = ("unshare", "nsenter", "setpriv", "mount", "chroot")
_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def why_not() -> str:
    """Why containers cannot be imitated here; "" if they can."""
    if os.getuid() != 0:
        return "imitating containers needs root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"imitating containers needs {', '.join(missing)} (util-linux)"
    probe = subprocess.run(
        ["unshare", "--mount", "--ipc", "--net", "mount", "-t", "tmpfs", "none", "/mnt"], check=False
    )
    return "imitating containers needs namespaces, which this machine does not grant" if probe.returncode else ""


class Container:
    """One service of the file, running."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, run_as: list[str]) -> None:
        self.name, self.process, self.log, self._run_as = name, process, log, run_as

    def execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command in it, as its user, like `docker exec`."""
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--ipc", "--net", "--root", "--wd"]
        return subprocess.run([*enter, *self._run_as, *command], capture_output=True, text=True, check=False)

    def check_health(self, service: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Runs the health check of its entry in the file."""
        kind, *command = service["healthcheck"]["test"]
        assert kind == "CMD"
        return self.execute(command)

    def within_network(self, call: Callable[[], T]) -> T:
        """Result of `call` on a thread that is inside its network."""

        def run() -> T:
            with open(f"/proc/{self.process.pid}/ns/net") as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Signals it and returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


class Sandbox:
    """All containers of one project. Volumes and root file systems lie below `directory`."""

    def __init__(self, project: dict[str, Any], directory: Path) -> None:
        self.project, self.directory = project, directory
        self.containers: dict[str, Container] = {}

    def volume(self, name: str) -> Path:
        """Directory that stands for a named volume; made for the services' user, as the image has it."""
        path = self.directory / "volumes" / name
        if not path.exists():
            path.mkdir(parents=True)
            uid, gid = map(int, self.project["services"]["memory"]["user"].split(":"))
            os.chown(path, uid, gid)
            path.chmod(0o700)
        return path

    def start(self, name: str) -> Container:
        """Starts a service (anew, if it ran before)."""
        service = self.project["services"][name]
        root = self.directory / "roots" / name
        root.mkdir(parents=True, exist_ok=True)
        script = "\n".join(shlex.join(command) for command in self._mounts(service, root))
        run_as = self._run_as(service)
        script += "\n" + shlex.join(["exec", "chroot", str(root), *run_as, *service["command"]])
        enter = ["unshare", "--mount", "--net", *self._ipc(service)]
        if (kind := str(service.get("ipc", ""))).startswith("service:"):
            owner = self.containers[kind.removeprefix("service:")].process.pid
            enter = ["nsenter", "--target", str(owner), "--ipc", "--mount", *enter]
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen([*enter, "sh", "-ec", script], stdout=output, stderr=output)
        container = self.containers[name] = Container(name, process, log, run_as)
        self._wait_until_inside(container, root)
        container.within_network(_raise_loopback)
        return container

    def _ipc(self, service: dict[str, Any]) -> list[str]:
        return [] if str(service.get("ipc", "")).startswith("service:") else ["--ipc"]

    def _mounts(self, service: dict[str, Any], root: Path) -> Iterator[list[str]]:
        """Commands that make the root file system."""

        def bind(source: Path, target: str, mode: str) -> Iterator[list[str]]:
            place = root / target.lstrip("/")
            yield ["mkdir", "-p", str(place if source.is_dir() else place.parent)]
            if not source.is_dir():
                yield ["touch", str(place)]
            yield ["mount", "--bind", str(source), str(place)]
            yield ["mount", "-o", f"remount,bind,nosuid,{mode}", str(place)]

        yield ["mount", "-t", "tmpfs", "-o", "mode=755", "root", str(root)]
        for top in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc"):
            path = Path("/", top)
            if path.is_symlink():
                yield ["ln", "-s", os.readlink(path), str(root / top)]
            elif path.exists():
                yield from bind(path, str(path), "ro")
        for special in ("/proc", "/dev"):
            yield ["mkdir", "-p", f"{root}{special}"]
            yield ["mount", "--rbind", special, f"{root}{special}"]
        yield ["mount", *self._shared_memory(service), f"{root}/dev/shm"]
        for mount in service["tmpfs"]:
            target, _, options = mount.partition(":")
            yield ["mkdir", "-p", f"{root}{target}"]
            yield ["mount", "-t", "tmpfs", "-o", f"noexec,nosuid,nodev,{options}", "tmpfs", f"{root}{target}"]
        yield from bind(Path(sys.prefix), "/opt/venv", "ro")
        yield from bind(Path(sys.base_prefix), sys.base_prefix, "ro")
        for path in copied_paths():
            yield from bind(ROOT / path, str(ROOT / path), "ro")
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            is_named = source in self.project["volumes"]
            yield from bind(self.volume(source) if is_named else Path(source), target, mode[0] if mode else "rw")
        for secret in service.get("secrets", []):
            file = Path(self.project["secrets"][secret]["file"])
            yield from bind(file, f"/run/secrets/{secret}", "ro")
        if service["read_only"]:
            yield ["mount", "-o", "remount,ro", str(root)]

    def _shared_memory(self, service: dict[str, Any]) -> list[str]:
        kind = str(service.get("ipc", ""))
        if kind.startswith("service:"):
            return ["--bind", str(self.directory / "roots" / kind.removeprefix("service:") / "dev" / "shm")]
        return ["-t", "tmpfs", "-o", f"mode=1777,size={size_bytes(service.get('shm_size', '64m'))}", "shm"]

    def _run_as(self, service: dict[str, Any]) -> list[str]:
        uid, gid = service["user"].split(":")
        privileges = ["setpriv", "--reuid", uid, "--regid", gid, "--clear-groups"]
        if service["cap_drop"] == ["ALL"]:
            privileges += ["--inh-caps=-all", "--bounding-set=-all"]
        if "no-new-privileges:true" in service["security_opt"]:
            privileges.append("--no-new-privs")
        environment = {**image_environment(), **service.get("environment", {})}
        environment["PATH"] = environment["PATH"].replace("$PATH", os.defpath)
        values = [f"{key}={value}" for key, value in environment.items() if value is not None]
        return [*privileges, "env", "--ignore-environment", f"--chdir={ROOT}", *values]

    def _wait_until_inside(self, container: Container, root: Path) -> None:
        """Until it has its root: from then on it is what the file describes."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and container.process.poll() is None:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{container.process.pid}/root") == str(root):
                    return
            time.sleep(0.01)
        raise AssertionError(f"{container.name} did not start: {container.log.read_text()}")

    def close(self) -> None:
        """Ends what still runs."""
        for container in self.containers.values():
            container.process.kill()
            container.process.wait()


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        set_flags, is_up = 0x8914, 0x1  # SIOCSIFFLAGS, IFF_UP
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh", b"lo", is_up) + bytes(22))
