"""How calls reach an executor: over gRPC or within this process.

A transport has one method per RPC, called as method(request, timeout=..., metadata=..., on_sent=...); `on_sent` runs
once the request is on its way (or just before it, where sending and waiting are one), so that work which does not
concern the call overlaps with it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from dspark.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

from service_kit.errors import ServiceError, UnavailableError

Metadata = Sequence[tuple[str, str]]


def nothing() -> None:
    """Does nothing: the default of `on_sent`."""


class ExecutorError(UnavailableError):
    """A call to an executor failed as a whole; the scheduler cannot go on."""


class _InProcessContext:
    """The part of a servicer context that a direct call can offer."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def is_active(self) -> bool:
        return True


class InProcessTransport:
    """Calls a servicer object directly, without a process or a socket between."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)

        def call(
            request: Any, *, timeout: float = 0.0, metadata: Metadata = (), on_sent: Callable[[], None] = nothing
        ) -> Any:
            on_sent()
            return method(request, _InProcessContext(metadata))

        return call


class _Streamed:
    """A unary method carried by one long-lived stream, which costs a third less than a call each. One caller at a time.

    The stream opens at the first request and again after an error. A stream has no deadline per message: a watching
    thread cancels it when one is overdue.
    """

    def __init__(self, open_stream: Callable[[Iterator[Any]], Any]) -> None:
        self._open_stream = open_stream
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._responses: Any = None
        self._deadline = float("inf")
        threading.Thread(target=self._watch, name="stream-deadline", daemon=True).start()

    def __call__(self, request: Any, timeout: float, on_sent: Callable[[], None]) -> Any:
        if self._responses is None:
            self._requests = queue.SimpleQueue()
            self._responses = self._open_stream(iter(self._requests.get, None))
        self._requests.put(request)
        self._deadline = time.monotonic() + timeout
        on_sent()
        try:
            return next(self._responses)
        except BaseException as error:
            is_overdue = time.monotonic() > self._deadline
            self._requests.put(None)
            self._responses = None
            if is_overdue:
                raise ExecutorError(f"no answer within {timeout:g} s") from error
            raise
        finally:
            self._deadline = float("inf")

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            if time.monotonic() > self._deadline and (responses := self._responses) is not None:
                responses.cancel()


class _GrpcTransport:
    """Unary calls by stub; the call of every step by stream, unless it carries metadata (a traced step)."""

    def __init__(self, stub: Any, stream: _Streamed) -> None:
        self._stub, self._stream = stub, stream

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _sent_before(getattr(self._stub, name))


class VerifierTransport(_GrpcTransport):
    """A verifier behind a channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)  # type: ignore[no-untyped-call]
        super().__init__(stub, _Streamed(stub.StepStream))

    def Step(
        self, request: Any, *, timeout: float, metadata: Metadata = (), on_sent: Callable[[], None] = nothing
    ) -> Any:
        """One step."""
        if metadata:
            return _sent_before(self._stub.Step)(request, timeout=timeout, metadata=metadata, on_sent=on_sent)
        return self._stream(verifier_pb2.StepStreamRequest(step=request), timeout, on_sent).step


class DrafterTransport(_GrpcTransport):
    """A drafter behind a channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)  # type: ignore[no-untyped-call]
        super().__init__(stub, _Streamed(stub.DraftStream))

    def Draft(
        self, request: Any, *, timeout: float, metadata: Metadata = (), on_sent: Callable[[], None] = nothing
    ) -> Any:
        """One draft call."""
        if metadata:
            return _sent_before(self._stub.Draft)(request, timeout=timeout, metadata=metadata, on_sent=on_sent)
        return self._stream(drafter_pb2.DraftStreamRequest(draft=request), timeout, on_sent).draft


def _sent_before(method: Callable[..., Any]) -> Callable[..., Any]:
    """A stub's method, which sends and waits at once: `on_sent` comes first."""

    def call(request: Any, *, timeout: float, metadata: Metadata = (), on_sent: Callable[[], None] = nothing) -> Any:
        on_sent()
        return method(request, timeout=timeout, metadata=metadata)

    return call


def call_executor(
    name: str,
    method: Callable[..., Any],
    request: Any,
    timeout_s: float,
    metadata: Metadata = (),
    on_sent: Callable[[], None] = nothing,
) -> Any:
    """Calls `method` of a transport. Raises ExecutorError, in words, whatever went wrong."""
    try:
        return method(request, timeout=timeout_s, metadata=metadata, on_sent=on_sent)
    except grpc.RpcError as error:
        code = error.code().name if hasattr(error, "code") else type(error).__name__
        details = error.details() if hasattr(error, "details") else str(error)
        raise ExecutorError(f"{name}: {code}: {details}") from error
    except StopIteration as error:
        raise ExecutorError(f"{name}: the stream ended") from error
    except ServiceError as error:
        raise ExecutorError(f"{name}: {error.status}: {error.message}") from error
