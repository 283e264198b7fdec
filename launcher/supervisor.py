"""Runs the services as local processes: start, wait for health, watch, stop in order. One dead service ends all."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launcher.client import Client
from launcher.processes import ServiceProcess
from launcher.services import ServicePlan
from launcher.settings import LauncherSettings, inherited_environment
from service_kit.rpc import open_channel, socket_address

_STOP_ORDER = (("server",), ("gateway",), ("scheduler",), ("drafter", "verifier"))
_POLL_S = 0.1
_LOADING_STOP_S = 1.0


class ServiceDiedError(Exception):
    """A service ended by itself. The message has its name, log path and last lines."""


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGHUP. A second signal asks for a stop without draining."""

    def __init__(self) -> None:
        self.count = 0
        self._event = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """True once asked to stop; waits at most `timeout_s`."""
        return self._event.wait(timeout_s)

    def request(self, *_: int | FrameType | None) -> None:
        """Asks for a stop; also the signal handler."""
        self.count += 1
        self._event.set()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the usual termination signals into a StopRequest. Main thread only."""
    request = StopRequest()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {each: signal.signal(each, request.request) for each in signals}
    try:
        yield request
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


class Supervisor:
    """The processes of one server."""

    def __init__(self, plans: Sequence[ServicePlan], run_dir: Path, log_dir: Path, settings: LauncherSettings) -> None:
        """Starts nothing yet. Sockets go to `run_dir`, logs to `log_dir`."""
        self._plans, self._run_dir, self._log_dir, self._settings = plans, run_dir, log_dir, settings
        self.processes: dict[str, ServiceProcess] = {}
        self._ready: set[str] = set()

    def start(self) -> None:
        """Starts all services at once; they wait for each other."""
        base = inherited_environment()
        for plan in self._plans:
            self.processes[plan.name] = ServiceProcess(
                plan.name,
                plan.module,
                {**base, **plan.environment},
                self._run_dir,
                self._log_dir / f"{plan.name}.log",
            )

    def wait_ready(self, url: str, stop: StopRequest, on_ready: Callable[[str], None]) -> bool:
        """Waits until every service is healthy, calling `on_ready` with each one's name. False if asked to stop.

        Raises ServiceDiedError if one ends or `start_timeout_s` passes.
        """
        pending = {plan.name: plan.grpc_service for plan in self._plans}
        deadline = time.monotonic() + self._settings.start_timeout_s
        with contextlib.ExitStack() as stack:
            client = Client(url)
            stack.callback(client.close)
            checks: dict[str, Callable[[], bool]] = dict.fromkeys(pending, client.is_ready)
            for name, grpc_service in pending.items():
                if grpc_service:
                    channel = stack.enter_context(
                        open_channel(socket_address(self._run_dir, name), max_message_bytes=2**20)
                    )
                    checks[name] = _grpc_check(channel, grpc_service)
            while pending:
                if stop.wait(_POLL_S):
                    return False
                self.check_alive()
                for name in [name for name in pending if checks[name]()]:
                    del pending[name]
                    self._ready.add(name)
                    on_ready(name)
                if time.monotonic() > deadline:
                    name = next(iter(pending))
                    raise ServiceDiedError(
                        f"{name} was not ready after {self._settings.start_timeout_s:.0f} s "
                        f"(DSPARK_LAUNCHER_START_TIMEOUT_S)\n{self._report(name)}"
                    )
        return True

    def watch(self, stop: StopRequest) -> None:
        """Returns when asked to stop. Raises ServiceDiedError if a service ends first."""
        while not stop.wait(_POLL_S):
            self.check_alive()

    def check_alive(self) -> None:
        """Raises ServiceDiedError if a service has ended, naming the one that others wait for first."""
        for name in (name for names in reversed(_STOP_ORDER) for name in names):
            process = self.processes.get(name)
            if process is not None and (code := process.exit_code) is not None:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                raise ServiceDiedError(f"{name} ended ({how})\n{self._report(name)}")

    def stop(self, request: StopRequest | None = None) -> None:
        """Stops gateway, scheduler, executors in this order, each in bounded time; at once after a second signal."""
        # One that is still loading has nothing to drain and may not listen to signals yet: all of those at once.
        loading = [process for name, process in self.processes.items() if name not in self._ready]
        for process in loading:
            process.terminate()
        loading_deadline = time.monotonic() + _LOADING_STOP_S
        for names in _STOP_ORDER:
            together = [self.processes[name] for name in names if name in self.processes]
            for process in together:
                process.terminate()
            for process in together:
                timeout_s = loading_deadline - time.monotonic() if process in loading else self._settings.stop_timeout_s
                process.wait_or_kill(timeout_s, lambda: request is not None and request.count > 1)

    def _report(self, name: str) -> str:
        process = self.processes[name]
        lines = "\n".join(f"  {line}" for line in process.last_lines())
        return f"log: {process.log_path}\n{lines}"


def _grpc_check(channel: grpc.Channel, service: str) -> Callable[[], bool]:
    stub = health_pb2_grpc.HealthStub(channel)

    def is_serving() -> bool:
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return is_serving


def new_log_dir(cache_dir: Path, keep: int) -> Path:
    """A directory for this run's logs; the oldest beyond `keep` runs are removed."""
    logs = cache_dir / "logs"
    run = logs / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    run.mkdir(parents=True)
    for old in sorted(path for path in logs.iterdir() if path.is_dir())[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return run
