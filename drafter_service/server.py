"""The drafter's gRPC door: wire messages to plain values and back."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import numpy as np
from dspark.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2

from drafter_service.engine import DrafterEngine
from drafter_service.model import PAGE_SIZE
from drafter_service.records import DraftResult, DraftRows, DraftWork, Ingests, IntArray, SessionSizes
from service_kit.cpu import cpu_name
from service_kit.errors import InvalidRequestError
from service_kit.rpc import CONTRACT_VERSION
from service_kit.telemetry import from_metadata, tracer

SERVICE_NAME = "dspark.v1.DrafterService"


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves an engine. Methods may be called in-process, without a context."""

    def __init__(self, engine: DrafterEngine) -> None:
        """`engine` must be warm."""
        self._engine = engine

    def GetInfo(
        self, request: drafter_pb2.DrafterServiceGetInfoRequest, context: grpc.ServicerContext | None = None
    ) -> drafter_pb2.DrafterServiceGetInfoResponse:
        """Describes the loaded drafter."""
        engine, config = self._engine, self._engine.config
        return drafter_pb2.DrafterServiceGetInfoResponse(
            contract_version=CONTRACT_VERSION,
            model=engine.name,
            fingerprint=engine.fingerprint,
            epoch=engine.epoch,
            block_size=config.block_size,
            elastic_block_sizes=config.elastic_block_sizes,
            target_vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            target_hidden_size=config.hidden_size,
            target_layer_ids=config.target_layer_ids,
            num_target_layers=config.num_target_layers,
            page_bytes=engine.model.page_bytes,
            page_size=PAGE_SIZE,
            has_confidence_head=config.has_confidence_head,
            weight_format=engine.weight_format,
            device=f"{cpu_name()}, {engine.threads} threads",
        )

    def Attach(
        self, request: drafter_pb2.DrafterServiceAttachRequest, context: grpc.ServicerContext | None = None
    ) -> drafter_pb2.DrafterServiceAttachResponse:
        """Starts or continues a session."""
        sizes = SessionSizes(request.num_slots, request.num_pages, request.max_model_len)
        arenas = self._engine.attach(request.session, sizes, request.features_arena)
        return drafter_pb2.DrafterServiceAttachResponse(
            epoch=self._engine.epoch,
            draft_probs_arena=arenas.draft_probs,
            draft_to_target_arena=arenas.draft_to_target,
        )

    def Draft(
        self, request: drafter_pb2.DraftRequest, context: grpc.ServicerContext | None = None
    ) -> drafter_pb2.DraftResponse:
        """Ingests, then drafts. A span is made only for a caller that is traced itself."""
        metadata = () if context is None else context.invocation_metadata()
        if any(key == "traceparent" for key, _ in metadata):
            with tracer().start_as_current_span("Draft", context=from_metadata(metadata)) as span:
                span.set_attribute("dspark.rows", len(request.row_slots))
                return self._draft(request)
        return self._draft(request)

    def _draft(self, request: drafter_pb2.DraftRequest) -> drafter_pb2.DraftResponse:
        work = _work_from_pb(request)
        return _result_to_pb(self._engine.draft(request.session, request.epoch, request.step_id, work))


def _work_from_pb(request: drafter_pb2.DraftRequest) -> DraftWork:
    """Raises InvalidRequestError if parallel arrays differ in length."""
    for fields in (
        ("ingest_slots", "ingest_starts", "ingest_counts", "ingest_oldest_step_ids", "ingest_newest_step_ids"),
        ("row_slots", "row_anchor_ids", "row_anchor_positions", "row_rounds"),
    ):
        lengths = [len(getattr(request, name)) for name in fields]
        if len(set(lengths)) > 1:
            raise InvalidRequestError(f"{', '.join(fields)} have lengths {lengths}, not one", field=fields[0])
    return DraftWork(
        slots=request.slots,
        ingests=Ingests(
            slots=_ints(request.ingest_slots),
            starts=_ints(request.ingest_starts),
            counts=_ints(request.ingest_counts),
            oldest_step_ids=np.array(request.ingest_oldest_step_ids, np.uint64),
            newest_step_ids=np.array(request.ingest_newest_step_ids, np.uint64),
        ),
        rows=DraftRows(
            slots=_ints(request.row_slots),
            anchor_ids=_ints(request.row_anchor_ids),
            anchor_positions=_ints(request.row_anchor_positions),
            rounds=_ints(request.row_rounds),
        ),
        num_drafts=request.num_draft_tokens,
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int64)


def _result_to_pb(result: DraftResult) -> drafter_pb2.DraftResponse:
    return drafter_pb2.DraftResponse(
        token_ids=result.token_ids.ravel().tolist(),
        confidences=result.confidences.astype("<f4").tobytes(),
        ingest_failures=[
            types_pb2.RowFailure(row=row, reason=reason) for row, reason in result.ingest_failures.items()
        ],
        timings=[
            types_pb2.PhaseTiming(phase=phase, duration_ns=duration)
            for phase, duration in result.timings._asdict().items()
        ],
    )
