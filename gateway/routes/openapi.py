"""GET /openapi.json."""

from __future__ import annotations

from importlib import metadata

import orjson
from fastapi import FastAPI
from fastapi.responses import Response

from gateway.openapi import openapi_document


def add_openapi_route(app: FastAPI, open_paths: frozenset[str], *, has_keys: bool) -> None:
    """The document, made once. `open_paths` are all of the application."""
    document = openapi_document(metadata.version("dspark-server"), open_paths=open_paths, has_keys=has_keys)
    content = orjson.dumps(document)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(content, media_type="application/json")
