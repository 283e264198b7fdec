"""gRPC set-up common to all services: channel and server options, health, reflection, error translation."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from service_kit.errors import ServiceError

CONTRACT_VERSION = 2
"""Version of proto/dspark/v1; sent in GetInfo and compared at start-up."""

FIELD_METADATA = "dspark-field"
"""Trailing metadata that names the request field at fault."""


def grpc_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options for both ends of a channel. Keep-alive pings must be tolerated during long prefills."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 0),
        # Sockets appear when a peer has loaded; gRPC's own back-off would sleep up to 20 s past that moment.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]


def socket_address(run_dir: Path, service: str) -> str:
    """Address of a service's Unix socket, e.g. unix:/run/user/1000/dspark/verifier.sock."""
    return f"unix:{run_dir / service}.sock"


def prepare_run_dir(run_dir: Path) -> None:
    """Creates the socket directory for this user only. Raises PermissionError if another user owns it."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if run_dir.stat().st_uid != os.getuid():
        raise PermissionError(f"{run_dir} belongs to another user: set DSPARK_RUN_DIR to a directory of your own")
    run_dir.chmod(0o700)


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status and the words a caller gets for `error`."""
    if isinstance(error, ServiceError):
        return grpc.StatusCode[error.status], error.message
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


def _details(error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    field = error.field if isinstance(error, ServiceError) else ""
    return *status_of(error), ((FIELD_METADATA, field),) if field else ()


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    code, message, metadata = _details(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, message)


class _SyncErrors(grpc.ServerInterceptor):
    """Turns ServiceError into a status on a threaded server."""

    def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        handler = continuation(details)
        if handler is None or not str(details.method).startswith("/dspark."):
            return handler  # health and reflection raise nothing of ours
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return handler.unary_unary(request, context)
            except Exception as error:
                _abort(context, error)

        return grpc.unary_unary_rpc_method_handler(call, **codec)


class _AsyncErrors(grpc.aio.ServerInterceptor):
    """Turns ServiceError into a status on an asyncio server, for unary and streaming handlers."""

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if not str(getattr(details, "method", "")).startswith("/dspark."):
            return handler
        if handler.unary_unary is not None:

            async def unary(request: Any, context: Any) -> Any:
                try:
                    return await handler.unary_unary(request, context)
                except ServiceError as error:
                    code, message, metadata = _details(error)
                    await context.abort(code, message, metadata)

            return grpc.unary_unary_rpc_method_handler(unary, **codec)
        if handler.unary_stream is not None:

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    async for message in handler.unary_stream(request, context):
                        yield message
                except ServiceError as error:
                    code, message_text, metadata = _details(error)
                    await context.abort(code, message_text, metadata)

            return grpc.unary_stream_rpc_method_handler(stream, **codec)
        return handler


def _add_standard_services(server: Any, service_name: str, health_servicer: Any) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def sync_server(
    service_name: str, address: str, register: Callable[[grpc.Server], None], *, max_message_bytes: int
) -> tuple[grpc.Server, health.HealthServicer]:
    """A threaded server (for executors) bound to `address`, NOT_SERVING until `set_serving`. Not started."""
    server = grpc.server(
        ThreadPoolExecutor(max_workers=8, thread_name_prefix="rpc"),
        interceptors=[_SyncErrors()],
        options=grpc_options(max_message_bytes),
    )
    health_servicer = health.HealthServicer()
    register(server)
    _add_standard_services(server, service_name, health_servicer)
    health_servicer.set(service_name, health_pb2.HealthCheckResponse.NOT_SERVING)
    bind(server, address)
    return server, health_servicer


def async_server(
    service_name: str, address: str, register: Callable[[grpc.aio.Server], None], *, max_message_bytes: int
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """An asyncio server (scheduler, gateway) bound to `address`; call inside a running loop. Not started."""
    server = grpc.aio.server(interceptors=[_AsyncErrors()], options=grpc_options(max_message_bytes))
    health_servicer = health.aio.HealthServicer()
    register(server)
    _add_standard_services(server, service_name, health_servicer)
    bind(server, address)
    return server, health_servicer


def bind(server: Any, address: str) -> None:
    """Binds a server. A dead process's socket file is removed; a live one's is an error naming the setting."""
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if path.exists():
            with grpc.insecure_channel(address) as channel:
                try:
                    grpc.channel_ready_future(channel).result(timeout=0.5)
                except grpc.FutureTimeoutError:
                    path.unlink()
                else:
                    raise OSError(f"socket {path} is in use by a running server: stop it or set DSPARK_RUN_DIR")
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot bind {address}: {error}") from error
    if bound == 0:
        raise OSError(f"cannot bind {address}: it is in use or not permitted")


def open_channel(address: str, *, max_message_bytes: int) -> grpc.Channel:
    """A blocking channel (the step loop)."""
    return grpc.insecure_channel(address, options=grpc_options(max_message_bytes))


def open_aio_channel(address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
    """An asyncio channel (the gateway)."""
    return grpc.aio.insecure_channel(address, options=grpc_options(max_message_bytes))


def wait_until_serving(channel: grpc.Channel, service_name: str, timeout_s: float) -> bool:
    """Polls standard health until the service is SERVING; False after `timeout_s`."""
    stub = health_pb2_grpc.HealthStub(channel)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service_name), timeout=1.0)
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                return True
        except grpc.RpcError:
            pass
        time.sleep(0.05)
    return False


def field_of(trailing_metadata: Sequence[tuple[str, str]] | None) -> str:
    """The request field a peer blamed, or ''."""
    return next((str(value) for key, value in trailing_metadata or () if key == FIELD_METADATA), "")
