"""Runs the gateway: binds, loads the tokenizer, serves REST and gRPC until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import uvicorn
from grpc_health.v1 import health_pb2
from prometheus_client.metrics_core import Metric

from gateway.app import create_app
from gateway.auth import ApiKeys
from gateway.chat_template import load_chat_template
from gateway.generation import TextGenerator
from gateway.key_limits import KeyLimits
from gateway.metrics_page import MetricsPage, MetricsSource
from gateway.prompts import PromptEncoder
from gateway.readiness import Readiness
from gateway.scheduler_client import SchedulerClient
from gateway.settings import GatewaySettings
from gateway.text_server import TEXT_SERVICE, create_text_server
from gateway.tokenizer import load_tokenizer
from service_kit.errors import ConfigurationError
from service_kit.metrics import new_registry

_log = logging.getLogger(__name__)


_CLOSE_S = 1
"""Seconds for the last bytes of answers that are complete."""


class ProcessMetrics(NamedTuple):
    """What the gateway's process counts besides the gateway's own metrics."""

    process: str
    """Labels its CPU time and memory."""
    collects: tuple[Callable[[], Iterable[Metric]], ...] = ()
    """Of other services in the same process."""


_OWN_METRICS = ProcessMetrics("gateway")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own, so that it can end in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_generator(settings: GatewaySettings, scheduler: SchedulerClient) -> TextGenerator:
    """Loads tokenizer and template. Raises ConfigurationError when the model directory cannot be used."""
    model_dir = settings.resolved_model_dir()
    tokenizer = load_tokenizer(model_dir)
    template = load_chat_template(model_dir, settings.chat_template)
    encoder = PromptEncoder(tokenizer, template, allow_special_tokens=settings.allow_special_tokens)
    readiness = Readiness(scheduler, stall_timeout_s=settings.stall_timeout_s)
    return TextGenerator(settings, scheduler, readiness, tokenizer, encoder)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigurationError naming the setting to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another port "
            "(DSPARK_GATEWAY_PORT, --port) or address (DSPARK_GATEWAY_HOST, --host)",
            field="DSPARK_GATEWAY_PORT",
        ) from error


def create_metrics_page(
    generator: TextGenerator, metrics: ProcessMetrics = _OWN_METRICS, sources: Sequence[MetricsSource] = ()
) -> MetricsPage:
    """What `/metrics` shows: this process, whose metrics besides the gateway's are `metrics`, and `sources`."""
    registry = new_registry(metrics.process, generator.metrics.collect, *metrics.collects)
    readiness = generator.readiness
    return MetricsPage(
        registry,
        sources,
        generator.model_names[0],
        has_drafter=lambda: readiness.info is None or bool(readiness.info.drafter),
    )


async def serve(
    settings: GatewaySettings,
    scheduler: SchedulerClient,
    stop: asyncio.Event,
    metrics: ProcessMetrics = _OWN_METRICS,
    sources: Sequence[MetricsSource] = (),
) -> None:
    """Serves until `stop` is set, then lets running requests finish for `drain_timeout_s`.

    `sources` are services in processes of their own whose metrics are shown, `metrics` those of this process. Listens
    before anything is loaded, so that a port in use fails at once. Raises ConfigurationError.
    """
    listener = bind(settings.host, settings.port)
    with listener:
        port = listener.getsockname()[1]
        keys = ApiKeys(settings.resolved_api_keys())
        limits = KeyLimits(settings)
        _warn_if_open(settings)
        generator = create_generator(settings, scheduler)
        grpc_port = settings.resolved_grpc_port(port)
        try:
            text_server, health = create_text_server(
                settings, generator, keys, limits, f"{settings.grpc_host}:{grpc_port}"
            )
        except OSError as error:
            raise ConfigurationError(
                f"{error}; choose another port for the text gRPC service (DSPARK_GATEWAY_GRPC_PORT)",
                field="DSPARK_GATEWAY_GRPC_PORT",
            ) from error

        async def set_health(is_ready: bool) -> None:
            status = health_pb2.HealthCheckResponse
            await health.set(TEXT_SERVICE, status.SERVING if is_ready else status.NOT_SERVING)

        metrics_page = create_metrics_page(generator, metrics, sources)
        await set_health(False)
        generator.readiness.listeners.append(set_health)
        server = _Server(
            uvicorn.Config(
                create_app(settings, generator, keys, limits, metrics_page),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                lifespan="off",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )
        await text_server.start()
        _log.info("REST on http://%s:%d, text gRPC on %s:%d", settings.host, port, settings.grpc_host, grpc_port)
        tasks = {asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(stop.wait())}
        watcher = asyncio.create_task(generator.readiness.run())
        try:
            await asyncio.wait({*tasks, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            # New requests get a status, not a refused connection, for as long as running ones take.
            await generator.readiness.drain()
            if not await generator.live.wait_idle(settings.drain_timeout_s):
                _log.warning("requests still ran after %d s: they end now", settings.drain_timeout_s)
            server.should_exit = True
            await asyncio.gather(*tasks, text_server.stop(_CLOSE_S))
            watcher.cancel()
            generator.close()
            await metrics_page.close()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher  # raises what ended it, if anything did


def _warn_if_open(settings: GatewaySettings) -> None:
    try:
        is_loopback = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not settings.resolved_api_keys():
        _log.warning("listening on %s without API keys: anyone who reaches it can use the model", settings.host)
