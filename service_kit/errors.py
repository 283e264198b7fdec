"""Errors that cross a process boundary. Core logic raises them; `rpc.py` turns them into gRPC statuses once."""

from __future__ import annotations


class ServiceError(Exception):
    """An error a caller should see. `status` is the name of a gRPC status code."""

    status = "INTERNAL"

    def __init__(self, message: str, *, field: str = "") -> None:
        """`field` names the request field at fault, if one is."""
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidRequestError(ServiceError):
    """The request can never be served as it is."""

    status = "INVALID_ARGUMENT"


class QueueFullError(ServiceError):
    """The bounded queue is full; try again later."""

    status = "RESOURCE_EXHAUSTED"


class UnavailableError(ServiceError):
    """Loading, draining, or a process behind this one is gone."""

    status = "UNAVAILABLE"


class SessionMismatchError(ServiceError):
    """A call for another session, epoch or step: refused, never guessed."""

    status = "FAILED_PRECONDITION"


class StaleArenaError(ServiceError):
    """A shared-memory arena or row carries another stamp than the one asked for."""

    status = "DATA_LOSS"


class ConfigurationError(ServiceError):
    """A checkpoint or setting that cannot be served; stops start-up in words."""

    status = "FAILED_PRECONDITION"
