"""MetricsService on a process's gRPC server, and the call to it."""

from __future__ import annotations

from typing import Any

import grpc
from dspark.v1 import metrics_pb2, metrics_pb2_grpc
from prometheus_client import CollectorRegistry

from service_kit.metrics import exposition


class _Servicer(metrics_pb2_grpc.MetricsServiceServicer):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def GetMetrics(self, request: metrics_pb2.GetMetricsRequest, context: Any) -> metrics_pb2.GetMetricsResponse:
        return metrics_pb2.GetMetricsResponse(exposition=exposition(self._registry))


class _AioServicer(metrics_pb2_grpc.MetricsServiceServicer):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def GetMetrics(self, request: metrics_pb2.GetMetricsRequest, context: Any) -> metrics_pb2.GetMetricsResponse:
        return metrics_pb2.GetMetricsResponse(exposition=exposition(self._registry))


def add_metrics_service(server: grpc.Server | grpc.aio.Server, registry: CollectorRegistry) -> None:
    """Serves what `registry` has. `server` must not have started."""
    servicer = _AioServicer(registry) if isinstance(server, grpc.aio.Server) else _Servicer(registry)
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


async def get_metrics(channel: grpc.aio.Channel, timeout_s: float) -> str:
    """The exposition of the process at the other end. Raises grpc.aio.AioRpcError."""
    stub: Any = metrics_pb2_grpc.MetricsServiceStub(channel)  # type: ignore[no-untyped-call]
    reply = await stub.GetMetrics(metrics_pb2.GetMetricsRequest(), timeout=timeout_s)
    return str(reply.exposition)
