"""Server-sent events, and noticing that the client has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import to_http
from gateway.responses import DONE, event
from service_kit.errors import ServiceError

KEEP_ALIVE = b": keep-alive\n\n"
ResultT = TypeVar("ResultT")
_log = logging.getLogger(__name__)


class ClientLeftError(Exception):
    """The connection was closed before the answer was complete."""


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Result of `work`, which is cancelled (and ClientLeftError raised) when the client disconnects first.

    The request body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def answer_while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response of `work`; an empty one that nobody receives when the client leaves first."""
    try:
        return await run_while_connected(request.receive, work)
    except ClientLeftError:
        _log.debug("client left before the answer: %s", request.url.path)
        return Response(status_code=499)


def _failure(error: Exception) -> bytes:
    return event(to_http(error).body)


class EventStream(Response):
    """Streams events. The status line goes out at once, so a request must have been admitted before."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        headers: Mapping[str, str],
        *,
        keepalive_s: float,
        to_failure: Callable[[Exception], bytes] = _failure,
    ) -> None:
        """`events` are complete events; `to_failure` makes that of an error. `on_close` is called at the end, however
        it came, and must abort the request (a client can be gone before `events` has started, and closing it then does
        nothing)."""
        self._events = events
        self._on_close = on_close
        self._keepalive_s = keepalive_s
        self._to_failure = to_failure
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the events end or the client leaves."""
        try:
            await run_while_connected(receive, self._send_all(send))
        except ClientLeftError:
            _log.debug("client left the stream: %s", scope["path"])
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(_with_keepalive(self._events, self._keepalive_s)) as chunks:
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                if not isinstance(error, ServiceError):
                    _log.exception("a stream failed")
                await send({"type": "http.response.body", "body": self._to_failure(error), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _with_keepalive(events: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """The events, with comment lines in silences: proxies cut connections that say nothing."""
    async with aclosing(events):
        while True:
            upcoming = asyncio.ensure_future(events.__anext__())
            try:
                while not (await asyncio.wait({upcoming}, timeout=interval_s))[0]:
                    yield KEEP_ALIVE
                chunk = upcoming.result()
            except StopAsyncIteration:
                return
            finally:
                if not upcoming.done():
                    upcoming.cancel()
                    await asyncio.gather(upcoming, return_exceptions=True)
            yield chunk
