"""A running server as a context: what `dspark serve`, `doctor`, `bench` and the integration tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.models import ModelPair
from launcher.preflight import check_port, instance_run_dir
from launcher.services import ServeOptions, plan_services
from launcher.settings import LauncherSettings
from launcher.supervisor import StopRequest, Supervisor, new_log_dir
from service_kit.settings import CommonSettings


@dataclass(frozen=True)
class RunningServer:
    """A server whose services are all healthy."""

    url: str
    run_dir: Path
    log_dir: Path
    supervisor: Supervisor


@contextlib.contextmanager
def running_server(
    options: ServeOptions,
    pair: ModelPair,
    *,
    common: CommonSettings,
    settings: LauncherSettings,
    stop: StopRequest,
    on_start: Callable[[Path, list[str]], None] = lambda log_dir, names: None,
    on_ready: Callable[[str], None] = lambda name: None,
) -> Iterator[RunningServer | None]:
    """Starts the services and stops them at the end. Yields None if asked to stop before they were ready.

    `on_start` gets the log directory and the services' names, `on_ready` each name as it becomes healthy. Raises
    ConfigurationError before anything starts, ServiceDiedError if a service ends during start.
    """
    check_port(options.host, options.port, "--port")
    check_port("127.0.0.1", options.text_port, "--port")
    with instance_run_dir(common.run_dir) as run_dir:
        log_dir = new_log_dir(common.cache_dir, settings.keep_logs)
        plans = plan_services(options, pair, common, settings, run_dir)
        supervisor = Supervisor(plans, run_dir, log_dir, settings)
        try:
            supervisor.start()
            on_start(log_dir, [plan.name for plan in plans])
            is_ready = supervisor.wait_ready(options.url, stop, on_ready)
            yield RunningServer(options.url, run_dir, log_dir, supervisor) if is_ready else None
        finally:
            supervisor.stop(stop)
