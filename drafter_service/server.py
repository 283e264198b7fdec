"""The drafter's gRPC service: conversion at the door, the engine behind it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dspark.v1 import drafter_pb2, drafter_pb2_grpc
from prometheus_client.metrics_core import Metric

from drafter_service.convert import info_to_pb, result_to_pb, work_from_pb
from drafter_service.engine import DrafterEngine
from drafter_service.loading import LoadedDrafter, load_drafter, warm_up
from drafter_service.records import SessionSizes
from drafter_service.settings import DrafterSettings
from service_kit import telemetry
from service_kit.engine_thread import EngineThread

SERVICE_NAME = "dspark.v1.DrafterService"


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """RPC handlers. In-process callers pass no context; errors are then `service_kit.errors`."""

    def __init__(self, engine: DrafterEngine) -> None:
        self._engine = engine

    def GetInfo(
        self, request: drafter_pb2.DrafterServiceGetInfoRequest, context: Any = None
    ) -> drafter_pb2.DrafterServiceGetInfoResponse:
        """Describes the loaded drafter."""
        return info_to_pb(self._engine)

    def Attach(
        self, request: drafter_pb2.DrafterServiceAttachRequest, context: Any = None
    ) -> drafter_pb2.DrafterServiceAttachResponse:
        """Starts or continues a session."""
        sizes = SessionSizes(request.num_slots, request.num_pages, request.max_model_len, request.kv_page_bytes)
        arenas = self._engine.attach(request.session, sizes, request.features_arena)
        return drafter_pb2.DrafterServiceAttachResponse(
            epoch=self._engine.epoch,
            draft_probs_arena=arenas.draft_probs,
            draft_to_target_arena=arenas.draft_to_target,
            blocks_arena=arenas.blocks,
        )

    def Draft(self, request: drafter_pb2.DraftRequest, context: Any = None) -> drafter_pb2.DraftResponse:
        """Ingests and drafts, inside a span if the caller traces this call."""
        metadata = context.invocation_metadata() if context else ()
        if not any(key == "traceparent" for key, _ in metadata):
            return self._draft(request)
        with telemetry.tracer().start_as_current_span("drafter.draft", telemetry.from_metadata(metadata)) as span:
            span.set_attribute("dspark.rows", len(request.row_slots))
            span.set_attribute("dspark.ingested", sum(request.ingest_counts))
            return self._draft(request)

    def draft_bytes(self, message: bytes) -> bytes:
        """Draft for `service_kit.step_socket`: messages serialised, never traced."""
        return self.Draft(drafter_pb2.DraftRequest.FromString(message), None).SerializeToString()

    def _draft(self, request: drafter_pb2.DraftRequest) -> drafter_pb2.DraftResponse:
        work = work_from_pb(request)
        return result_to_pb(self._engine.draft(request.session, request.epoch, request.step_id, work))

    def metrics(self) -> Iterable[Metric]:
        """Metrics of the drafter."""
        return self._engine.metrics()

    def close(self) -> None:
        """Gives back the session's shared memory."""
        self._engine.close()


def load_servicer(settings: DrafterSettings, thread: EngineThread, cache_dir: Path | None = None) -> DrafterServicer:
    """Loads and warms up a drafter on `thread`. Raises ConfigurationError for anything that cannot be served.

    Nothing is kept in `cache_dir`: drafts never decide a text, so a drafter needs no self-test.
    """

    def load() -> LoadedDrafter:
        drafter = load_drafter(settings)
        warm_up(drafter)
        return drafter

    return DrafterServicer(DrafterEngine(thread.submit(load).result(), thread))
