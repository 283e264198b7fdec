"""The page at `/`: a chat that shows what speculation did. Its files hold no data; all it shows it asks of the API."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.settings import GatewaySettings

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline: text that a model makes up cannot run or fetch anything.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_page_routes(app: FastAPI, settings: GatewaySettings) -> frozenset[str]:
    """The page's files, unless it is switched off. Returns their paths, which need no key."""
    if not settings.page:
        return frozenset()
    paths = set()
    for file in (resources.files("gateway") / "static").iterdir():
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        media_type = _TYPES[file.name.rpartition(".")[2]]
        serve = _serve(file.read_bytes(), media_type)
        app.add_api_route(path, serve, methods=["GET", "HEAD"], include_in_schema=False)
        paths.add(path)
    return frozenset(paths)


def _serve(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def serve(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if headers["etag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return serve
