"""How calls reach an executor: over its sockets or within this process.

A transport has one method per RPC, called as method(request, timeout=...), and `exchange(name)` for the call of every
step, which sends and receives apart: what does not concern the call is done in between.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import grpc
from dspark.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

from service_kit.errors import ServiceError, UnavailableError
from service_kit.step_socket import StepConnection

Metadata = Sequence[tuple[str, str]]

_RESPONSES = {"Step": verifier_pb2.StepResponse, "Draft": drafter_pb2.DraftResponse}


class ExecutorError(UnavailableError):
    """A call to an executor failed as a whole; the scheduler cannot go on."""


class Exchange(Protocol):
    """Sends requests and receives their answers in order. An error ends every call in flight."""

    def send(self, request: Any, timeout_s: float, metadata: Metadata) -> None:
        """Puts a request on its way. One with metadata (a traced step) must be alone in flight."""
        ...

    def receive(self, timeout_s: float) -> Any:
        """The answer to the oldest request in flight."""
        ...


class _InProcessContext:
    """The part of a servicer context that a direct call can offer."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def is_active(self) -> bool:
        return True


class _InProcessExchange:
    """Runs requests in order on a thread, so that one may wait behind another here as well."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._worker = ThreadPoolExecutor(1, "in-process")
        self._answers: deque[Future[Any]] = deque()
        self._has_failed = False

    def send(self, request: Any, timeout_s: float, metadata: Metadata) -> None:
        self._answers.append(self._worker.submit(self._run, request, metadata))

    def _run(self, request: Any, metadata: Metadata) -> Any:
        if self._has_failed:
            raise UnavailableError("the call before it failed")
        try:
            return self._method(request, _InProcessContext(metadata))
        except BaseException:
            self._has_failed = True
            raise

    def receive(self, timeout_s: float) -> Any:
        try:
            return self._answers.popleft().result()
        except BaseException:
            wait(self._answers)  # they fail as well
            self._answers.clear()
            self._has_failed = False
            raise


class InProcessTransport:
    """Calls a servicer object directly, without a process or a socket between."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)
        return lambda request, *, timeout=0.0: method(request, _InProcessContext(()))

    def exchange(self, name: str) -> Exchange:
        """Calls of the servicer's method `name`."""
        return _InProcessExchange(getattr(self._servicer, name))


class _SocketExchange:
    """Requests over the executor's step socket; one with metadata by gRPC, which carries it."""

    def __init__(self, unary: Any, path: Path, response: Any) -> None:
        self._unary, self._response = unary, response
        self._connection = StepConnection(path)
        self._traced: Any = None

    def send(self, request: Any, timeout_s: float, metadata: Metadata) -> None:
        if metadata:
            self._traced = self._unary.future(request, timeout=timeout_s, metadata=metadata)
        else:
            self._connection.send(request.SerializeToString(), timeout_s)

    def receive(self, timeout_s: float) -> Any:
        if self._traced is not None:
            traced, self._traced = self._traced, None
            return traced.result()
        return self._response.FromString(self._connection.receive(timeout_s))


class _SocketTransport:
    """An executor behind a channel and a step socket."""

    def __init__(self, stub: Any, step_path: Path) -> None:
        self._stub, self._step_path = stub, step_path

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._stub, name)
        return method

    def exchange(self, name: str) -> Exchange:
        """Calls of the RPC `name`."""
        return _SocketExchange(getattr(self._stub, name), self._step_path, _RESPONSES[name])


class VerifierTransport(_SocketTransport):
    """A verifier behind sockets."""

    def __init__(self, channel: grpc.Channel, step_path: Path) -> None:
        super().__init__(verifier_pb2_grpc.VerifierServiceStub(channel), step_path)  # type: ignore[no-untyped-call]


class DrafterTransport(_SocketTransport):
    """A drafter behind sockets."""

    def __init__(self, channel: grpc.Channel, step_path: Path) -> None:
        super().__init__(drafter_pb2_grpc.DrafterServiceStub(channel), step_path)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def calling(name: str) -> Iterator[None]:
    """Raises ExecutorError, in words, whatever goes wrong in a call to the executor `name`."""
    try:
        yield
    except grpc.RpcError as error:
        code = error.code().name if hasattr(error, "code") else type(error).__name__
        details = error.details() if hasattr(error, "details") else str(error)
        raise ExecutorError(f"{name}: {code}: {details}") from error
    except ServiceError as error:
        raise ExecutorError(f"{name}: {error.status}: {error.message}") from error
