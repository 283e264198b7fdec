"""Between wire messages and the engine's plain values."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from dspark.v1 import types_pb2, verifier_pb2

from kernels.token_scores import TokenScore
from service_kit.errors import InvalidRequestError
from service_kit.rpc import CONTRACT_VERSION
from service_kit.scores import scores_to_pb
from verifier_service.config import SamplingDefaults
from verifier_service.draft_source import DraftArenas
from verifier_service.engine import VerifierEngine
from verifier_service.model import PAGE_SIZE
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import BlockRows, Ints, StepBatch, StepResult

_MAX_PADDED_ROWS = 64
"""Row counts described in GetInfo; padding beyond them is negligible."""


def info_to_pb(engine: VerifierEngine) -> verifier_pb2.VerifierServiceGetInfoResponse:
    """Description of the loaded target."""
    target = engine.target
    config = target.model.config
    return verifier_pb2.VerifierServiceGetInfoResponse(
        contract_version=CONTRACT_VERSION,
        model=target.name,
        fingerprint=target.fingerprint,
        epoch=engine.epoch,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        max_position=config.max_position,
        page_bytes=target.model.page_bytes,
        page_size=PAGE_SIZE,
        eos_token_ids=config.eos_token_ids,
        weight_format=target.weight_format,
        device=target.device,
        padded_rows=[target.padded_rows(num_rows) for num_rows in range(1, _MAX_PADDED_ROWS + 1)],
        sampling_defaults=_sampling_to_pb(config.sampling_defaults),
        weight_format_reason=target.weight_format_reason,
        inexact_reason=target.inexact_reason,
        sets_verify_lens=engine.sets_verify_lens,
    )


def _sampling_to_pb(defaults: SamplingDefaults) -> verifier_pb2.SamplingDefaults:
    return verifier_pb2.SamplingDefaults(
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )


def sizes_from_pb(request: verifier_pb2.VerifierServiceAttachRequest) -> SessionSizes:
    """Sizes of the session asked for."""
    return SessionSizes(
        num_slots=request.num_slots,
        num_pages=request.num_pages,
        max_model_len=request.max_model_len,
        max_batch_tokens=request.max_batch_tokens,
        feature_ring_rows=request.feature_ring_rows,
        max_draft_tokens=request.max_draft_tokens,
        feature_layer_ids=tuple(request.feature_layer_ids),
        kv_page_bytes=request.kv_page_bytes,
    )


def arenas_from_pb(request: verifier_pb2.VerifierServiceAttachRequest) -> DraftArenas:
    """Names of the drafter's arenas."""
    return DraftArenas(request.draft_probs_arena, request.draft_to_target_arena, request.blocks_arena)


def batch_from_pb(request: verifier_pb2.StepRequest) -> StepBatch:
    """A step's rows as arrays."""
    return StepBatch(
        session=request.session,
        epoch=request.epoch,
        step_id=request.step_id,
        slots=request.slots,
        row_slots=_ints(request.row_slots),
        row_starts=_ints(request.row_starts),
        row_num_tokens=_ints(request.row_num_tokens),
        row_num_drafts=_ints(request.row_num_drafts),
        row_emits=np.array(list(request.row_emits), np.bool_),
        row_rounds=_ints(request.row_rounds),
        token_ids=_ints(request.token_ids),
        row_chained=np.array(list(request.row_chained), np.bool_),
        prob_asks=_asks_from_pb(request),
        row_masked=np.array(list(request.row_masked), np.bool_),
        blocks=_blocks_from_pb(request) if request.block_rows else None,
    )


def _blocks_from_pb(request: verifier_pb2.StepRequest) -> BlockRows:
    weights = np.array(request.block_weights or [1.0] * len(request.block_rows), np.float64)
    return BlockRows(_ints(request.block_rows), _ints(request.block_max_drafts), weights, request.verify_budget)


def _asks_from_pb(request: verifier_pb2.StepRequest) -> Ints:
    """[asks, 3]. Raises InvalidRequestError if the parallel arrays differ in length."""
    arrays = (request.prob_rows, request.prob_positions, request.prob_token_ids)
    if len({len(array) for array in arrays}) != 1:
        raise InvalidRequestError("prob arrays have different lengths", field="prob_rows")
    return np.stack([_ints(array) for array in arrays], axis=1)


def _ints(values: Collection[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def step_to_pb(result: StepResult) -> verifier_pb2.StepResponse:
    """Answer to a step."""
    accepted = result.accepted
    return verifier_pb2.StepResponse(
        verify_lens=accepted.verify_lens,
        accepted_lens=accepted.accepted_lens,
        token_ids=accepted.token_ids,
        failures=[types_pb2.RowFailure(row=row, reason=reason) for row, reason in accepted.failures],
        timings=[
            types_pb2.PhaseTiming(phase=phase.name, duration_ns=phase.end_ns - phase.start_ns, start_ns=phase.start_ns)
            for phase in result.phases
        ],
        scores=_row_scores_to_pb(accepted.scores),
        prompt_scores=_row_scores_to_pb(accepted.prompt_scores),
        target_probs=accepted.target_probs.astype("<f4").tobytes(),
    )


def _row_scores_to_pb(scores: dict[int, list[TokenScore]]) -> list[verifier_pb2.RowScores]:
    return [verifier_pb2.RowScores(row=row, scores=scores_to_pb(own)) for row, own in scores.items()]
