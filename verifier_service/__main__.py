"""The verifier process: `python -m verifier_service`, configured by DSPARK_VERIFIER_* and DSPARK_*."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time

from dspark.v1 import verifier_pb2_grpc
from grpc_health.v1 import health_pb2

from service_kit import telemetry
from service_kit.engine_thread import EngineThread
from service_kit.errors import ServiceError
from service_kit.handoff import remove_orphans
from service_kit.rpc import prepare_run_dir, socket_address, sync_server
from service_kit.settings import CommonSettings, load_settings
from service_kit.step_socket import StepServer, step_socket_path
from verifier_service.server import SERVICE_NAME, load_servicer
from verifier_service.settings import VerifierSettings

_STOP_GRACE_S = 5.0

logger = logging.getLogger(__name__)


def run(common: CommonSettings, settings: VerifierSettings) -> None:
    """Serves until SIGTERM or SIGINT."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    telemetry.set_up("verifier", common)
    prepare_run_dir(common.run_dir)
    for name in remove_orphans():
        logger.warning("removed shared memory %s of a process that is gone", name)

    started = time.monotonic()
    thread = EngineThread("verifier-engine")
    servicer = load_servicer(settings, thread)
    address = socket_address(common.run_dir, "verifier")
    server, health = sync_server(
        SERVICE_NAME,
        address,
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server),  # type: ignore[no-untyped-call]
        max_message_bytes=settings.max_message_bytes,
    )
    steps = StepServer(
        step_socket_path(common.run_dir, "verifier"), servicer.step_bytes, max_message_bytes=settings.max_message_bytes
    )
    server.start()
    health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
    logger.info("%s on %s after %.1f s", settings.model, address, time.monotonic() - started)

    stopping.wait()
    health.enter_graceful_shutdown()
    server.stop(_STOP_GRACE_S).wait()
    steps.close()
    servicer.close()
    thread.stop()


def main() -> int:
    """Returns the process's exit status: 1 with one line of words for anything that cannot be served."""
    try:
        run(load_settings(CommonSettings), load_settings(VerifierSettings))
    except (ServiceError, OSError) as error:
        print(f"verifier: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
