"""Limits of each API key: requests at once, and requests a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import RateLimitError
from gateway.settings import GatewaySettings
from gateway.web import error_response

_MINUTE_S = 60.0


@dataclass
class _Use:
    """What a key has used."""

    num_running: int = 0
    tokens: float = 0.0
    """Requests that it may start now."""
    refilled_s: float = 0.0
    """When `tokens` was right."""


class KeyLimits:
    """Counts requests by key. There are as many entries as keys, so nothing grows."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._max_concurrent = settings.key_max_concurrent
        self._per_minute = settings.key_requests_per_minute
        self._retry_after_s = settings.retry_after_s
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}

    @contextmanager
    def request(self, isolation_key: bytes) -> Iterator[None]:
        """Around a request of the caller that `isolation_key` stands for. Raises RateLimitError."""
        use = self._uses.get(isolation_key)
        if use is None:
            use = self._uses[isolation_key] = _Use(tokens=self._per_minute, refilled_s=self._clock())
        if self._max_concurrent and use.num_running >= self._max_concurrent:
            raise RateLimitError(
                f"this API key may run {self._max_concurrent} requests at once: wait for one to end",
                code="too_many_concurrent_requests",
                retry_after_s=self._retry_after_s,
            )
        if self._per_minute:
            self._take(use)
        use.num_running += 1
        try:
            yield
        finally:
            use.num_running -= 1

    def _take(self, use: _Use) -> None:
        now = self._clock()
        rate = self._per_minute / _MINUTE_S
        use.tokens = min(self._per_minute, use.tokens + (now - use.refilled_s) * rate)
        use.refilled_s = now
        if use.tokens < 1:
            raise RateLimitError(
                f"this API key may start {self._per_minute} requests a minute",
                code="rate_limit_exceeded",
                retry_after_s=math.ceil((1 - use.tokens) / rate),
            )
        use.tokens -= 1


class KeyLimitMiddleware:
    """Applies the limits to every POST that needed a key, to the end of its answer."""

    def __init__(self, app: ASGIApp, limits: KeyLimits) -> None:
        """Wraps `app`."""
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 429 to what is too much."""
        isolation_key = scope.get("state", {}).get("isolation_key")
        if scope["type"] != "http" or scope["method"] != "POST" or isolation_key is None:
            await self._app(scope, receive, send)
            return
        try:
            with self._limits.request(isolation_key):
                await self._app(scope, receive, send)
        except RateLimitError as error:
            await error_response(error, retry_after_s=error.retry_after_s)(scope, receive, send)
