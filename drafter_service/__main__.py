"""`python -m drafter_service`: the drafter process."""

from __future__ import annotations

import logging
import signal
import sys
import threading

from dspark.v1 import drafter_pb2_grpc
from grpc_health.v1 import health_pb2

from drafter_service.engine import DrafterEngine
from drafter_service.pair import check_pair
from drafter_service.server import SERVICE_NAME, DrafterServicer
from drafter_service.settings import DrafterSettings
from service_kit import rpc, telemetry
from service_kit.errors import ConfigurationError
from service_kit.handoff import remove_orphans
from service_kit.settings import CommonSettings, load_settings

_log = logging.getLogger(__name__)
_GRACE_S = 5.0
"""Time a call in flight gets at the end."""


def main() -> int:
    """Serves until SIGTERM or SIGINT. Exit status 2 for a configuration that cannot be served."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        common, settings = load_settings(CommonSettings), load_settings(DrafterSettings)
        telemetry.set_up("drafter", common)
        rpc.prepare_run_dir(common.run_dir)
        remove_orphans()
        pair = check_pair(settings.model, settings.target)
        engine = DrafterEngine(
            pair, weight_format=settings.weight_format, kernels=settings.kernels, threads=settings.threads
        )
        engine.warm_up()
        server, health = rpc.sync_server(
            SERVICE_NAME,
            rpc.socket_address(common.run_dir, "drafter"),
            lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(  # type: ignore[no-untyped-call]
                DrafterServicer(engine), server
            ),
            max_message_bytes=settings.max_message_bytes,
        )
    except (ConfigurationError, OSError) as error:
        print(f"drafter: {error}", file=sys.stderr)
        return 2
    server.start()
    health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
    _log.info("drafting with %s (%s, %d threads)", engine.name, engine.weight_format, engine.threads)
    stopped.wait()
    health.enter_graceful_shutdown()
    server.stop(_GRACE_S).wait()
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
