"""The scheduler process: python -m scheduler_service."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
from dspark.v1 import scheduler_pb2_grpc
from grpc_health.v1 import health_pb2

from scheduler_service.server import SERVICE_NAME, SchedulerServicer
from scheduler_service.service import Scheduler
from scheduler_service.settings import SchedulerSettings
from scheduler_service.startup import build_scheduler
from scheduler_service.transport import DrafterTransport, VerifierTransport
from service_kit import rpc, telemetry
from service_kit.errors import ServiceError, UnavailableError
from service_kit.metrics import new_registry
from service_kit.metrics_rpc import add_metrics_service
from service_kit.settings import CommonSettings, load_settings
from service_kit.step_socket import step_socket_path

log = logging.getLogger(__name__)

T = TypeVar("T")


def open_transports(
    settings: SchedulerSettings, common: CommonSettings
) -> tuple[VerifierTransport, DrafterTransport | None]:
    """Waits for the executors' health; the drafter's is None when verify_mode is off. Raises UnavailableError."""
    channels = {}
    for name in ("verifier",) if settings.verify_mode == "off" else ("verifier", "drafter"):
        address = rpc.socket_address(common.run_dir, name)
        channels[name] = rpc.open_channel(address, max_message_bytes=settings.max_message_bytes)
        service = f"dspark.v1.{name.capitalize()}Service"
        if not rpc.wait_until_serving(channels[name], service, settings.startup_timeout_s):
            raise UnavailableError(
                f"the {name} at {address} is not serving after {settings.startup_timeout_s:.0f} s: see its log, or "
                "raise DSPARK_SCHEDULER_STARTUP_TIMEOUT_S"
            )
    paths = {name: step_socket_path(common.run_dir, name) for name in channels}
    drafter = DrafterTransport(channels["drafter"], paths["drafter"]) if "drafter" in channels else None
    return VerifierTransport(channels["verifier"], paths["verifier"]), drafter


def connect(settings: SchedulerSettings, common: CommonSettings) -> Scheduler:
    """Waits for the executors, then builds the scheduler over blocking calls. Raises ServiceError."""
    return build_scheduler(settings, *open_transports(settings, common), common.cache_dir)


async def serve(settings: SchedulerSettings, common: CommonSettings) -> int:
    """Serves until SIGTERM or SIGINT (drains) or a failure; returns the exit status. A second signal forces."""
    loop = asyncio.get_running_loop()
    stop, force, failed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    servicer = SchedulerServicer()
    registry = new_registry("scheduler", servicer.metrics)

    def register(server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        add_metrics_service(server, registry)

    address = rpc.socket_address(common.run_dir, "scheduler")
    server, health = rpc.async_server(SERVICE_NAME, address, register, max_message_bytes=settings.max_message_bytes)
    await health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    connecting = _on_daemon_thread(connect, settings, common)
    await _first_of(connecting, stop.wait())
    if connecting.cancelled() or connecting.exception():
        await server.stop(grace=None)  # grpc prints a traceback, after our words, about one that runs at exit
    if connecting.cancelled():
        log.info("stopped while loading")
        return 0
    scheduler = connecting.result()
    servicer.serve(scheduler, failed)
    await health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
    await _first_of(stop.wait(), failed.wait())
    await health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
    if failed.is_set():
        await server.stop(grace=1.0)  # lets the streams end with their error
        log.error("stopping: %s", scheduler.failure)
        return 1
    log.info("draining for at most %.0f s", settings.drain_timeout_s)
    await _first_of(asyncio.to_thread(scheduler.drain, settings.drain_timeout_s), force.wait(), failed.wait())
    await asyncio.to_thread(scheduler.stop)
    await server.stop(grace=1.0)
    return 1 if failed.is_set() else 0


async def _first_of(*awaitables: Awaitable[Any]) -> None:
    """Returns when one of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if not task.done():
            task.cancel()


def _on_daemon_thread(work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but the process does not wait for it at exit."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="startup", daemon=True).start()
    return asyncio.wrap_future(future)


def main() -> int:
    """Entry point; returns the exit status."""
    try:
        common, settings = load_settings(CommonSettings), load_settings(SchedulerSettings)
        telemetry.set_up("scheduler", common)
        rpc.prepare_run_dir(common.run_dir)
        return asyncio.run(serve(settings, common))
    except (ServiceError, OSError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
