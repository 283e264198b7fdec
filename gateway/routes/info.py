"""What is served and whether it is ready: /v1/models, /health, /version."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from gateway.errors import error_body
from gateway.generation import TextGenerator
from gateway.settings import GatewaySettings
from gateway.web import json_response

_NOT_READY = {
    "loading": "the model is loading",
    "stalled": "requests run, but no token came for longer than DSPARK_GATEWAY_STALL_TIMEOUT_S",
    "unavailable": "the model server is not available",
    "draining": "the server is about to end",
}


def add_info_routes(app: FastAPI, settings: GatewaySettings, generator: TextGenerator) -> frozenset[str]:
    """Endpoints that never touch the scheduler: they answer from what the gateway last heard.

    Returns the paths that need no key: those of probes.
    """
    readiness = generator.readiness
    started = int(time.time())
    version = metadata.version("dspark-server")

    def model_card(name: str) -> dict[str, Any]:
        info = readiness.require_info()
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "dspark",
            "root": generator.model_names[0],
            "max_model_len": info.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card(name) for name in generator.model_names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(model_card(generator.resolve_model(name)))

    @app.get("/health/live")
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Response:
        if readiness.state == "ready":
            reason = readiness.require_info().inexact_reason
            exactness = {"bit_exact": False, "inexact_reason": reason} if reason else {"bit_exact": True}
            return json_response({"status": "ready", **exactness})
        body = error_body(_NOT_READY[readiness.state], "server_error", code=readiness.state)
        return json_response(body, 503, {"retry-after": str(settings.retry_after_s)})

    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version})

    return frozenset({"/health", "/health/live", "/health/ready"})
