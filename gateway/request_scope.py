"""What a request is known by while it is served, wherever in the gateway that is."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import NamedTuple


class RequestScope(NamedTuple):
    """One call of a client."""

    call_id: str
    """The client's X-Request-Id if it is well-formed, else one made here; one call may be several generations."""
    arrived_s: float
    """On the monotonic clock."""


_scope: ContextVar[RequestScope | None] = ContextVar("request_scope", default=None)


def enter_request(call_id: str) -> None:
    """A call begins on this task; tasks that it starts inherit it."""
    _scope.set(RequestScope(call_id, time.monotonic()))


def current_request() -> RequestScope:
    """The call that is being served; outside of any, one that begins now."""
    return _scope.get() or RequestScope("", time.monotonic())
