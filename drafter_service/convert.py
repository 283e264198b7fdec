"""Wire messages to plain values and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dspark.v1 import drafter_pb2, types_pb2

from drafter_service.engine import DrafterEngine
from drafter_service.model import PAGE_SIZE
from drafter_service.records import DraftResult, DraftRows, DraftWork, Ingests, IntArray
from service_kit.errors import InvalidRequestError
from service_kit.rpc import CONTRACT_VERSION


def info_to_pb(engine: DrafterEngine) -> drafter_pb2.DrafterServiceGetInfoResponse:
    """The loaded drafter."""
    drafter, config = engine.drafter, engine.drafter.model.config
    return drafter_pb2.DrafterServiceGetInfoResponse(
        contract_version=CONTRACT_VERSION,
        model=drafter.name,
        fingerprint=drafter.fingerprint,
        epoch=engine.epoch,
        block_size=config.block_size,
        elastic_block_sizes=config.elastic_block_sizes,
        target_vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        target_hidden_size=config.hidden_size,
        target_layer_ids=config.target_layer_ids,
        num_target_layers=config.num_target_layers,
        page_bytes=drafter.model.page_bytes,
        page_size=PAGE_SIZE,
        has_confidence_head=config.has_confidence_head,
        weight_format=drafter.weight_format,
        device=drafter.device,
        calibration=drafter.calibration.words,
        publishes_blocks=engine.publishes_blocks,
    )


def work_from_pb(request: drafter_pb2.DraftRequest) -> DraftWork:
    """Raises InvalidRequestError if parallel arrays differ in length."""
    for fields in (
        ("ingest_slots", "ingest_starts", "ingest_counts", "ingest_oldest_step_ids", "ingest_newest_step_ids"),
        ("row_slots", "row_anchor_ids", "row_anchor_positions", "row_rounds"),
    ):
        lengths = [len(getattr(request, name)) for name in fields]
        if len(set(lengths)) > 1:
            raise InvalidRequestError(f"{', '.join(fields)} have lengths {lengths}, not one", field=fields[0])
    shape = (len(request.row_slots), request.num_draft_tokens)
    odds = np.frombuffer(request.confidence_odds, "<f8") if request.confidence_odds else np.ones(shape)
    if odds.size != shape[0] * shape[1]:
        raise InvalidRequestError(f"{odds.size} confidence odds for {shape[0]} x {shape[1]}", field="confidence_odds")
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
        confidence_odds=odds.reshape(shape) if request.publishes_blocks else None,
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int64)


def result_to_pb(result: DraftResult) -> drafter_pb2.DraftResponse:
    """The answer to Draft."""
    return drafter_pb2.DraftResponse(
        token_ids=result.token_ids.ravel().tolist(),
        confidences=result.confidences.astype("<f4").tobytes(),
        draft_probs=result.draft_probs.astype("<f4").tobytes(),
        ingest_failures=[
            types_pb2.RowFailure(row=row, reason=reason) for row, reason in result.ingest_failures.items()
        ],
        timings=[
            types_pb2.PhaseTiming(phase=phase, duration_ns=duration)
            for phase, duration in result.timings._asdict().items()
        ],
    )
