"""The REST application."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from gateway.auth import ApiKeys, AuthMiddleware
from gateway.generation import TextGenerator
from gateway.key_limits import KeyLimitMiddleware, KeyLimits
from gateway.metrics_page import MetricsPage
from gateway.request_scope import current_request
from gateway.routes.generate import add_generate_routes
from gateway.routes.info import add_info_routes
from gateway.routes.metrics import METRICS_PATH, add_metrics_routes
from gateway.routes.openapi import add_openapi_route
from gateway.routes.page import add_page_routes
from gateway.routes.responses import add_responses_routes
from gateway.routes.tokenize import add_tokenize_routes
from gateway.settings import GatewaySettings
from gateway.web import RequestContext, error_response, handler_of, http_exception_response
from service_kit.errors import ServiceError
from service_kit.logs import log_event

_log = logging.getLogger(__name__)


def create_app(
    settings: GatewaySettings, generator: TextGenerator, keys: ApiKeys, limits: KeyLimits, metrics_page: MetricsPage
) -> FastAPI:
    """The application. Starts nothing: the caller runs the generator's readiness.

    The text gRPC service has the same `keys` and `limits`.
    """
    # Spans are RequestContext's: those that newer versions of FastAPI make would double them. Older ones ignore this.
    telemetry: Any = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}
    app = FastAPI(title="DSpark", docs_url=None, redoc_url=None, openapi_url=None, telemetry=telemetry)

    async def on_service_error(request: Request, error: Exception) -> Response:
        # Without its words: they can quote the request. What was wrong with it is in the answer.
        response = error_response(error, retry_after_s=settings.retry_after_s)
        log_event(
            _log,
            "error response",
            call_id=current_request().call_id,
            handler=handler_of(request.scope),
            status=response.status_code,
            error=type(error).__name__,
            field=getattr(error, "field", "")[:100] or None,
        )
        return response

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_exception_response(error)

    app.add_exception_handler(ServiceError, on_service_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    add_generate_routes(app, settings, generator)
    add_responses_routes(app, settings, generator)
    add_tokenize_routes(app, settings, generator)
    # Closed unless named here: the paths that need no key, as the groups of routes that have some return them.
    open_paths = add_info_routes(app, settings, generator) | add_page_routes(app, settings)
    open_paths |= add_metrics_routes(app, settings, metrics_page)
    app.state.open_paths = open_paths
    add_openapi_route(app, open_paths, has_keys=keys.has_any)
    app.add_middleware(KeyLimitMiddleware, limits=limits)
    app.add_middleware(AuthMiddleware, keys=keys, open_paths=open_paths)
    if settings.cors_origins:  # outside of the keys: preflights carry none, and browsers must be able to read a 401
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("retry-after", "x-request-id", "x-dspark-exact", "x-dspark-ignored-parameters"),
        )
    app.add_middleware(RequestContext, quiet_paths=open_paths | {METRICS_PATH}, metrics=generator.metrics)
    return app
