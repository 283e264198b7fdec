"""All services in one process, without executors' sockets between them: `python -m launcher.one_process`.

For small machines, and to see what process boundaries cost. Both executors share one engine thread: they alternate
anyway, and a second one would bring a second OpenMP pool. The scheduler's socket stays, for its counters.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any, NamedTuple

from dspark.v1 import scheduler_pb2_grpc
from grpc_health.v1 import health_pb2

import drafter_service.server
import verifier_service.server
from drafter_service.settings import DrafterSettings
from gateway.scheduler_client import LocalScheduler
from gateway.server import ProcessMetrics, serve
from gateway.settings import GatewaySettings
from scheduler_service.server import SERVICE_NAME, SchedulerServicer
from scheduler_service.service import Scheduler
from scheduler_service.settings import SchedulerSettings
from scheduler_service.startup import build_scheduler
from scheduler_service.transport import InProcessTransport
from service_kit import rpc, telemetry
from service_kit.engine_thread import EngineThread
from service_kit.errors import ServiceError
from service_kit.settings import CommonSettings, load_settings
from verifier_service.settings import VerifierSettings


class _Loaded(NamedTuple):
    scheduler: Scheduler
    executors: tuple[Any, ...]
    """Servicers of the verifier and, with speculation, the drafter."""


def _load(common: CommonSettings, settings: SchedulerSettings, engine: EngineThread) -> _Loaded:
    """Loads both executors and a scheduler over them. Raises ConfigurationError."""
    executors: list[Any] = [
        verifier_service.server.load_servicer(load_settings(VerifierSettings), engine, common.cache_dir)
    ]
    if settings.verify_mode != "off":
        executors.append(drafter_service.server.load_servicer(load_settings(DrafterSettings), engine))
    verifier, *drafter = map(InProcessTransport, executors)
    scheduler = build_scheduler(settings, verifier, drafter[0] if drafter else None, common.cache_dir)
    return _Loaded(scheduler, tuple(executors))


async def _run(common: CommonSettings, settings: SchedulerSettings, gateway: GatewaySettings) -> int:
    loop, stop, failed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    engine = EngineThread("engine")
    scheduler, executors = await asyncio.to_thread(_load, common, settings, engine)
    servicer = SchedulerServicer()
    servicer.serve(scheduler, failed)
    server, health = rpc.async_server(
        SERVICE_NAME,
        rpc.socket_address(common.run_dir, "scheduler"),
        lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server),  # type: ignore[no-untyped-call]
        max_message_bytes=settings.max_message_bytes,
    )
    await health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    failure = asyncio.create_task(_stop_on(failed, stop))
    try:
        metrics = ProcessMetrics("server", tuple(each.metrics for each in (servicer, *executors)))
        await serve(gateway, LocalScheduler(servicer), stop, metrics)
    finally:
        failure.cancel()
        await asyncio.to_thread(scheduler.stop)
        await server.stop(grace=1.0)
        engine.stop()
    if failed.is_set():
        print(f"server: {scheduler.failure}", file=sys.stderr)
    return 1 if failed.is_set() else 0


async def _stop_on(failed: asyncio.Event, stop: asyncio.Event) -> None:
    await failed.wait()
    stop.set()


def main() -> int:
    """Returns the process's exit status: 1 with one line of words for anything that cannot be served."""
    try:
        common, settings = load_settings(CommonSettings), load_settings(SchedulerSettings)
        gateway = load_settings(GatewaySettings)
        telemetry.set_up("server", common)
        rpc.prepare_run_dir(common.run_dir)
        return asyncio.run(_run(common, settings, gateway))
    except (ServiceError, OSError) as error:
        print(f"server: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
