"""GET /metrics."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import Response

from gateway.metrics_page import MetricsPage
from gateway.settings import GatewaySettings

METRICS_PATH = "/metrics"
_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_metrics_routes(app: FastAPI, settings: GatewaySettings, page: MetricsPage) -> frozenset[str]:
    """Metrics of all services for Prometheus. Returns the path if it needs no key."""

    @app.get(METRICS_PATH)
    async def metrics() -> Response:
        return Response(await page.text(), media_type=_MEDIA_TYPE)

    return frozenset({METRICS_PATH}) if settings.metrics_open else frozenset()
