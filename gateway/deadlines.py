"""Ends requests that take too long."""

from __future__ import annotations

import asyncio

from gateway.errors import TimeoutExpiredError
from gateway.scheduler_client import TokenStream
from gateway.settings import GatewaySettings


class Deadlines:
    """The two of a request, both from admission on: to its first token, and to its end. Make it inside the loop."""

    def __init__(self, stream: TokenStream, settings: GatewaySettings) -> None:
        """Fails `stream` with a TimeoutExpiredError when one passes."""
        loop = asyncio.get_running_loop()
        first = TimeoutExpiredError(
            f"no token within {settings.first_token_timeout_s:g} s: the server is too busy, or the prompt too long",
            code="first_token_timeout",
        )
        whole = TimeoutExpiredError(
            f"the answer was not complete within {settings.generation_timeout_s:g} s", code="generation_timeout"
        )
        self._first = loop.call_later(settings.first_token_timeout_s, stream.fail, first)
        self._whole = loop.call_later(settings.generation_timeout_s, stream.fail, whole)

    def keep_first(self) -> None:
        """There is a token. May be called again."""
        self._first.cancel()

    def close(self) -> None:
        """The request has ended. May be called again."""
        self._first.cancel()
        self._whole.cancel()
