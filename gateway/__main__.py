"""`python -m gateway`: the gateway process."""

from __future__ import annotations

import asyncio
import signal
import sys

from gateway.metrics_page import MetricsSource
from gateway.scheduler_client import GrpcScheduler
from gateway.server import serve
from gateway.settings import GatewaySettings
from service_kit.errors import ConfigurationError
from service_kit.rpc import socket_address
from service_kit.settings import CommonSettings, load_settings
from service_kit.telemetry import set_up

_SERVICES_WITH_METRICS = ("scheduler", "drafter", "verifier")


async def _run(common: CommonSettings, settings: GatewaySettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)  # the second signal ends the process at once

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    scheduler = GrpcScheduler(socket_address(common.run_dir, "scheduler"))
    sources = [MetricsSource(name, socket_address(common.run_dir, name)) for name in _SERVICES_WITH_METRICS]
    try:
        await serve(settings, scheduler, stop, sources=sources)
    finally:
        await scheduler.close()


def main() -> int:
    """Runs until a signal. Returns the exit status."""
    try:
        common = load_settings(CommonSettings)
        settings = load_settings(GatewaySettings)
        set_up("gateway", common)
        asyncio.run(_run(common, settings))
    except ConfigurationError as error:
        print(f"gateway: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
