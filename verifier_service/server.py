"""The verifier's gRPC service: conversion at the door, the engine behind it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dspark.v1 import verifier_pb2, verifier_pb2_grpc
from prometheus_client.metrics_core import Metric

from service_kit import telemetry
from service_kit.engine_thread import EngineThread
from verifier_service.convert import arenas_from_pb, batch_from_pb, info_to_pb, sizes_from_pb, step_to_pb
from verifier_service.engine import VerifierEngine
from verifier_service.loading import load_target
from verifier_service.settings import VerifierSettings

SERVICE_NAME = "dspark.v1.VerifierService"


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """RPC handlers. In-process callers may pass None as the context; errors are then `service_kit.errors`."""

    def __init__(self, engine: VerifierEngine) -> None:
        self._engine = engine

    def GetInfo(
        self, request: verifier_pb2.VerifierServiceGetInfoRequest, context: Any
    ) -> verifier_pb2.VerifierServiceGetInfoResponse:
        """Describes the loaded target."""
        return info_to_pb(self._engine)

    def Attach(
        self, request: verifier_pb2.VerifierServiceAttachRequest, context: Any
    ) -> verifier_pb2.VerifierServiceAttachResponse:
        """Starts a session or maps the drafter's arenas."""
        arenas = arenas_from_pb(request)
        attachment = self._engine.attach(request.session, sizes_from_pb(request), arenas, request.masks_arena)
        return verifier_pb2.VerifierServiceAttachResponse(
            epoch=attachment.epoch, features_arena=attachment.features_arena
        )

    def Step(self, request: verifier_pb2.StepRequest, context: Any) -> verifier_pb2.StepResponse:
        """Runs one step, inside a span if the caller traces this one."""
        metadata = context.invocation_metadata() if context else ()
        if not any(key == "traceparent" for key, _ in metadata):
            return step_to_pb(self._engine.step(batch_from_pb(request)))
        with telemetry.tracer().start_as_current_span("verifier.step", telemetry.from_metadata(metadata)) as span:
            span.set_attribute("dspark.rows", len(request.row_slots))
            span.set_attribute("dspark.tokens", len(request.token_ids))
            response = step_to_pb(self._engine.step(batch_from_pb(request)))
            span.set_attribute("dspark.accepted", sum(response.accepted_lens))
            return response

    def step_bytes(self, message: bytes) -> bytes:
        """Step for `service_kit.step_socket`: messages serialised, never traced."""
        return self.Step(verifier_pb2.StepRequest.FromString(message), None).SerializeToString()

    def Profile(self, request: verifier_pb2.ProfileRequest, context: Any) -> verifier_pb2.ProfileResponse:
        """Times forwards of one shape."""
        durations = self._engine.profile(request.num_tokens, request.context_len, request.repeats)
        return verifier_pb2.ProfileResponse(forward_ns=durations)

    def metrics(self) -> Iterable[Metric]:
        """Metrics of the verifier."""
        return self._engine.metrics()

    def close(self) -> None:
        """Gives back the session's shared memory."""
        self._engine.close()


def load_servicer(settings: VerifierSettings, thread: EngineThread, cache_dir: Path | None = None) -> VerifierServicer:
    """Loads and warms the target on `thread`, which the caller keeps and stops; remembers self-tests in `cache_dir`.

    Raises ConfigurationError, in words, for a checkpoint that cannot be served.
    """
    target = thread.submit(lambda: load_target(settings, cache_dir)).result()
    engine = VerifierEngine(target, thread)
    engine.warm_up()
    return VerifierServicer(engine)
