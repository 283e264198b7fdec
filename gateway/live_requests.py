"""Requests that run, so that the gateway can wait for them before it ends."""

from __future__ import annotations

import asyncio
import contextlib


class LiveRequests:
    """A set to wait for. Use it on one event loop."""

    def __init__(self) -> None:
        """Empty."""
        self._requests: set[object] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def add(self, request: object) -> None:
        """A request was admitted."""
        self._requests.add(request)
        self._is_idle.clear()

    def discard(self, request: object) -> None:
        """It has ended. May be called again."""
        self._requests.discard(request)
        if not self._requests:
            self._is_idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Returns when none runs; False after the timeout."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        return self._is_idle.is_set()
