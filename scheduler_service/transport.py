"""How calls reach an executor: over gRPC or within this process.

A transport is an object with one method per RPC, called as method(request, timeout=..., metadata=...): a blocking gRPC
stub, or `InProcessTransport` around a servicer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from service_kit.errors import ServiceError, UnavailableError

Metadata = Sequence[tuple[str, str]]


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

        def call(request: Any, *, timeout: float = 0.0, metadata: Metadata = ()) -> Any:
            return method(request, _InProcessContext(metadata))

        return call


def call_executor(
    name: str, method: Callable[..., Any], request: Any, timeout_s: float, metadata: Metadata = ()
) -> Any:
    try:
        return method(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        code = error.code().name if hasattr(error, "code") else type(error).__name__
        details = error.details() if hasattr(error, "details") else str(error)
        raise ExecutorError(f"{name}: {code}: {details}") from error
    except ServiceError as error:
        raise ExecutorError(f"{name}: {error.status}: {error.message}") from error
