"""The gateway's way to the scheduler: one interface, over gRPC or within the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

import grpc
from dspark.v1 import scheduler_pb2, scheduler_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.conversions import (
    abort_to_pb,
    model_info_from_pb,
    progress_from_pb,
    request_to_pb,
    response_from_pb,
)
from gateway.tokens import FinishReason, ModelInfo, Progress, Summary, TokenRequest, Tokens
from service_kit.errors import InvalidRequestError, QueueFullError, ServiceError, UnavailableError
from service_kit.rpc import field_of, open_aio_channel
from service_kit.telemetry import to_metadata

SCHEDULER_SERVICE = "dspark.v1.SchedulerService"
_UNARY_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class TokenStream(Protocol):
    """Messages of an admitted request; the last one is the Summary. Errors are ServiceErrors."""

    def __aiter__(self) -> AsyncGenerator[Tokens | Summary, None]:
        """Iterates once."""

    def cancel(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""

    def fail(self, error: ServiceError) -> None:
        """Aborts the request, and raises `error` in whoever iterates."""


class SchedulerClient(Protocol):
    """What the gateway asks of a scheduler."""

    async def generate(self, request: TokenRequest, *, timeout_s: float) -> TokenStream:
        """Returns once the request is admitted to the queue. Raises a ServiceError when it is refused."""

    async def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        """Ends a request or one of its choices. Never raises."""

    async def model_info(self) -> ModelInfo:
        """What is served. Raises UnavailableError."""

    async def is_serving(self) -> bool:
        """Whether requests are taken now. Never raises."""

    async def progress(self) -> Progress:
        """How far it is. Raises a ServiceError when it does not say."""

    async def close(self) -> None:
        """Releases the connection."""


class GrpcScheduler:
    """A scheduler in another process."""

    def __init__(self, address: str, *, max_message_bytes: int = 16 * 2**20) -> None:
        """Opens a channel to `address`; nothing needs to listen there yet. Call inside a running loop."""
        self._channel = open_aio_channel(address, max_message_bytes=max_message_bytes)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def generate(self, request: TokenRequest, *, timeout_s: float) -> TokenStream:
        """See SchedulerClient."""
        call: Any = self._stub.Generate(request_to_pb(request), metadata=to_metadata())
        stream = _GrpcStream(call)
        try:
            # The scheduler sends its initial metadata when it has queued the request.
            await asyncio.wait_for(call.initial_metadata(), timeout_s)
            if call.done() and await call.code() is not grpc.StatusCode.OK:
                raise _translate(await call.code(), await call.details(), await call.trailing_metadata())
        except asyncio.TimeoutError:
            call.cancel()
            raise UnavailableError(f"the scheduler did not admit the request within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _from_rpc(error) from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        return stream

    async def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        """See SchedulerClient."""
        try:
            await self._stub.Abort(abort_to_pb(request_id, choice, reason), timeout=_UNARY_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.warning("abort of %s failed: %s", request_id, error.details())

    async def model_info(self) -> ModelInfo:
        """See SchedulerClient."""
        try:
            request = scheduler_pb2.GetModelInfoRequest()
            return model_info_from_pb(await self._stub.GetModelInfo(request, timeout=_UNARY_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise _from_rpc(error) from error

    async def is_serving(self) -> bool:
        """See SchedulerClient."""
        try:
            reply = await self._health.Check(
                health_pb2.HealthCheckRequest(service=SCHEDULER_SERVICE), timeout=_UNARY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def progress(self) -> Progress:
        """See SchedulerClient."""
        try:
            return progress_from_pb(await self._stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=_UNARY_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise _from_rpc(error) from error

    async def close(self) -> None:
        """See SchedulerClient."""
        await self._channel.close()


class _GrpcStream:
    def __init__(self, call: Any) -> None:
        self._call = call
        self._failure: ServiceError | None = None

    async def __aiter__(self) -> AsyncGenerator[Tokens | Summary, None]:
        try:
            async for response in self._call:
                yield response_from_pb(response)
        except grpc.aio.AioRpcError as error:
            raise _from_rpc(error) from error
        except asyncio.CancelledError:  # raised by a call that was cancelled, too
            if self._failure is not None:
                raise self._failure from None
            raise

    def cancel(self) -> None:
        self._call.cancel()

    def fail(self, error: ServiceError) -> None:
        self._failure = error
        self._call.cancel()


def _from_rpc(error: grpc.aio.AioRpcError) -> ServiceError:
    return _translate(error.code(), error.details(), error.trailing_metadata())


def _translate(code: grpc.StatusCode, details: str | None, metadata: Any) -> ServiceError:
    message = details or code.name.lower()
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(message, field=field_of(metadata))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QueueFullError(message)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        _log.warning("scheduler unavailable: %s", message)  # its text may hold addresses: not for clients
        return UnavailableError("the model server takes no requests now (it is draining or restarting): try again")
    return ServiceError(message)


class LocalScheduler:
    """A scheduler in this process: its gRPC servicer, called directly on the running loop."""

    def __init__(self, servicer: Any) -> None:
        """`servicer` has the methods of SchedulerService as coroutines, Generate as an async generator."""
        self._servicer = servicer

    async def generate(self, request: TokenRequest, *, timeout_s: float) -> TokenStream:
        """See SchedulerClient."""
        context = _LocalContext(to_metadata())
        stream = _LocalStream(self._servicer.Generate(request_to_pb(request), context), context)
        try:
            await asyncio.wait_for(context.is_admitted.wait(), timeout_s)
        except asyncio.TimeoutError:
            stream.cancel()
            raise UnavailableError(f"the scheduler did not admit the request within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            stream.cancel()
            raise
        stream.raise_if_refused()
        return stream

    async def abort(self, request_id: str, choice: int | None, reason: FinishReason) -> None:
        """See SchedulerClient."""
        try:
            await self._servicer.Abort(abort_to_pb(request_id, choice, reason), _LocalContext(()))
        except ServiceError as error:
            _log.warning("abort of %s failed: %s", request_id, error.message)

    async def model_info(self) -> ModelInfo:
        """See SchedulerClient."""
        reply = await self._servicer.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), _LocalContext(()))
        return model_info_from_pb(reply)

    async def is_serving(self) -> bool:
        """True: whoever made this client waits for the scheduler first."""
        return True

    async def progress(self) -> Progress:
        """See SchedulerClient."""
        return progress_from_pb(await self._servicer.GetLoad(scheduler_pb2.GetLoadRequest(), _LocalContext(())))

    async def close(self) -> None:
        """Nothing to release: the servicer belongs to its maker."""


class _LocalContext:
    """The part of grpc.aio.ServicerContext that servicers here use."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata
        self.is_admitted = asyncio.Event()
        self._callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.is_admitted.set()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def finish(self, *_: Any) -> None:
        """The call ended, however it did."""
        for callback in self._callbacks:
            callback(self)


class _LocalStream:
    """Runs the servicer's generator in a task, as a gRPC server would; cancelling the task aborts the request."""

    def __init__(self, responses: AsyncIterator[Any], context: _LocalContext) -> None:
        self._messages: asyncio.Queue[Tokens | Summary | ServiceError | None] = asyncio.Queue()
        self._refusal: ServiceError | None = None
        self._task = asyncio.create_task(self._pump(responses, context))
        self._task.add_done_callback(context.finish)

    async def _pump(self, responses: AsyncIterator[Any], context: _LocalContext) -> None:
        try:
            async for response in responses:
                context.is_admitted.set()
                self._messages.put_nowait(response_from_pb(response))
            self._messages.put_nowait(None)
        except Exception as error:
            if not isinstance(error, ServiceError):
                _log.exception("the scheduler failed")
            known = error if isinstance(error, ServiceError) else ServiceError(f"{type(error).__name__}: {error}")
            if not context.is_admitted.is_set():
                self._refusal = known
            self._messages.put_nowait(known)
        finally:
            context.is_admitted.set()

    def raise_if_refused(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncGenerator[Tokens | Summary, None]:
        while (message := await self._messages.get()) is not None:
            if isinstance(message, ServiceError):
                raise message
            yield message

    def cancel(self) -> None:
        self._task.cancel()

    def fail(self, error: ServiceError) -> None:
        self._messages.put_nowait(error)
        self._task.cancel()
