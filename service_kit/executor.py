"""The process of an executor: settings, load, a gRPC server and a step socket, until a signal."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from grpc_health.v1 import health_pb2
from pydantic_settings import BaseSettings

from service_kit import telemetry
from service_kit.engine_thread import EngineThread
from service_kit.errors import ServiceError
from service_kit.handoff import remove_orphans
from service_kit.metrics import new_registry
from service_kit.metrics_rpc import add_metrics_service
from service_kit.rpc import prepare_run_dir, socket_address, sync_server
from service_kit.settings import CommonSettings, load_settings
from service_kit.step_socket import StepServer, step_socket_path

_STOP_GRACE_S = 5.0

logger = logging.getLogger(__name__)


class Executor(NamedTuple):
    """What distinguishes one executor from the other."""

    name: str
    """Of its sockets, spans and log lines."""
    service_name: str
    """Its gRPC service in full."""
    settings_class: type[BaseSettings]
    """With the fields `model` and `max_message_bytes`."""
    load: Callable[[Any, EngineThread, Path], Any]
    """From settings, engine thread and cache directory to a servicer that is warm, has metrics and can be closed."""
    register: Callable[[Any, Any], None]
    """Adds a servicer to a gRPC server."""
    step_call: Callable[[Any], Callable[[bytes], bytes]]
    """A servicer's handler of serialised calls, for the step socket."""

    def main(self) -> int:
        """Returns the process's exit status: 1 with one line of words for anything that cannot be served."""
        try:
            self._run(load_settings(CommonSettings), load_settings(self.settings_class))
        except (ServiceError, OSError) as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 1
        return 0

    def _run(self, common: CommonSettings, settings: Any) -> None:
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        telemetry.set_up(self.name, common)
        prepare_run_dir(common.run_dir)
        for orphan in remove_orphans():
            logger.warning("removed shared memory %s of a process that is gone", orphan)

        started = time.monotonic()
        thread = EngineThread(f"{self.name}-engine")
        servicer = self.load(settings, thread, common.cache_dir)
        address, max_bytes = socket_address(common.run_dir, self.name), settings.max_message_bytes
        registry = new_registry(self.name, servicer.metrics)

        def register(server: Any) -> None:
            self.register(servicer, server)
            add_metrics_service(server, registry)

        server, health = sync_server(self.service_name, address, register, max_message_bytes=max_bytes)
        steps = StepServer(
            step_socket_path(common.run_dir, self.name), self.step_call(servicer), max_message_bytes=max_bytes
        )
        server.start()
        health.set(self.service_name, health_pb2.HealthCheckResponse.SERVING)
        logger.info("%s on %s after %.1f s", settings.model, address, time.monotonic() - started)

        stopping.wait()
        health.enter_graceful_shutdown()
        server.stop(_STOP_GRACE_S).wait()
        steps.close()
        servicer.close()
        thread.stop()
