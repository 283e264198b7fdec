"""What a request is known by while it is served, wherever in the gateway that is."""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from typing import NamedTuple

_CALL_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


class RequestScope(NamedTuple):
    """One call of a client."""

    call_id: str
    """The client's X-Request-Id if it is well-formed, else one made here; one call may be several generations."""
    arrived_s: float
    """On the monotonic clock."""


_scope: ContextVar[RequestScope | None] = ContextVar("request_scope", default=None)


def enter_request(given_id: str) -> RequestScope:
    """A call begins on this task; tasks that it starts inherit it. `given_id` is what the client calls it, or empty."""
    scope = RequestScope(given_id if _CALL_ID.match(given_id) else uuid.uuid4().hex, time.monotonic())
    _scope.set(scope)
    return scope


def current_request() -> RequestScope:
    """The call that is being served; outside of any, one that begins now."""
    return _scope.get() or RequestScope("", time.monotonic())
