"""HTTP odds and ends: JSON in, JSON out, error responses, request ids, one span a request."""

from __future__ import annotations

import logging
import time
from typing import Any

import orjson
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import BodyTooLargeError, error_body, to_http
from gateway.metrics import GatewayMetrics
from gateway.request_scope import enter_request
from service_kit.errors import InvalidRequestError
from service_kit.telemetry import from_metadata, tracer

_CLIENT_LEFT = 499
_log = logging.getLogger(__name__)

_UNTRACED = set_span_in_context(NonRecordingSpan(SpanContext(trace_id=1, span_id=1, is_remote=False)))
"""A caller that is not sampled: nothing below it is either."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: Exception, *, retry_after_s: int) -> Response:
    """OpenAI's error body with the status that fits; 429 and 503 say when to come back."""
    status, body = to_http(error)
    return json_response(body, status, {"retry-after": str(retry_after_s)} if status in (429, 503) else None)


def http_exception_response(error: HTTPException) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    body = error_body(str(error.detail), "invalid_request_error")
    return json_response(body, error.status_code, dict(error.headers or {}))


async def read_json(request: Request, max_bytes: int) -> Any:
    """The decoded body. Raises BodyTooLargeError as soon as it is too long, InvalidRequestError for broken JSON."""
    too_large = BodyTooLargeError(f"the request body is larger than {max_bytes} bytes")
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from error


class RequestContext:
    """Outermost middleware: X-Request-Id in and out, a server span, and a body for errors nobody caught."""

    def __init__(self, app: ASGIApp, quiet_paths: frozenset[str], metrics: GatewayMetrics) -> None:
        """Wraps `app`. `quiet_paths`, those of probes, pages and scrapes, leave no spans and are not counted."""
        self._app = app
        self._quiet_paths = quiet_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request = enter_request(headers.get("x-request-id", ""))
        is_quiet = scope["path"] in self._quiet_paths
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request.call_id
            await send(message)

        with tracer().start_as_current_span(
            f"{scope['method']} {scope['path']}",
            context=_UNTRACED if is_quiet else from_metadata(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        ) as span:
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                _log.exception("request %s failed", request.call_id)
                span.record_exception(error)
                if status == 0:
                    await error_response(error, retry_after_s=1)(scope, receive, send_with_id)
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
        if not is_quiet:
            duration_s = time.monotonic() - request.arrived_s
            self._metrics.count_http(handler_of(scope), scope["method"], status or _CLIENT_LEFT, duration_s)


def handler_of(scope: Scope) -> str:
    """Template of the route that answered; "none" where none did, so that paths made up by clients are no labels."""
    return str(getattr(scope.get("route"), "path", "none"))
