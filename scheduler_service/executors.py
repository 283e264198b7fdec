"""The scheduler's end of the two executors: plain values in, plain values out. Wire types stop here."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from dspark.v1 import drafter_pb2, types_pb2, verifier_pb2

from kernels.sampling import Regime, TargetOptions
from scheduler_service.executor_types import (
    DraftArenas,
    DraftCall,
    DrafterInfo,
    DraftResult,
    Phase,
    SamplingDefaults,
    SessionSizes,
    StepCall,
    StepResult,
    TargetProbAsks,
    TargetProbs,
    VerifierInfo,
)
from scheduler_service.slot_updates import SlotUpdates
from scheduler_service.transport import ExecutorError, Metadata, calling
from service_kit.scores import scores_from_pb

_REGIMES = {
    Regime.GREEDY: types_pb2.REGIME_GREEDY,
    Regime.COUPLED: types_pb2.REGIME_COUPLED,
    Regime.REJECTION: types_pb2.REGIME_REJECTION,
}


class VerifierClient:
    """Calls the verifier."""

    def __init__(self, transport: Any, timeout_s: float) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self._steps = transport.exchange("Step")
        self._sent: deque[tuple[int, TargetProbAsks]] = deque()
        """Number of rows and asks of each step in flight, the oldest first."""
        self._session = self._epoch = 0

    def info(self) -> VerifierInfo:
        """What is loaded."""
        request = verifier_pb2.VerifierServiceGetInfoRequest()
        with calling("verifier"):
            reply = self._transport.GetInfo(request, timeout=self._timeout_s)
        defaults = reply.sampling_defaults
        known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        names = [name for name in known if defaults.HasField(name)]
        return VerifierInfo(
            contract_version=reply.contract_version,
            model=reply.model,
            vocab_size=reply.vocab_size,
            hidden_size=reply.hidden_size,
            num_layers=reply.num_layers,
            max_position=reply.max_position,
            page_bytes=reply.page_bytes,
            page_size=reply.page_size,
            eos_token_ids=frozenset(reply.eos_token_ids),
            padded_rows=tuple(reply.padded_rows),
            sampling_defaults=SamplingDefaults(**{name: getattr(defaults, name) for name in names}),
            inexact_reason=reply.inexact_reason,
            fingerprint=reply.fingerprint,
            weight_format=reply.weight_format,
            device=reply.device,
            sets_verify_lens=reply.sets_verify_lens,
        )

    def attach(self, sizes: SessionSizes, arenas: DraftArenas = DraftArenas()) -> str:  # noqa: B008 - immutable
        """Starts a session, or maps the drafter's arenas within it; returns the name of the feature arena."""
        request = verifier_pb2.VerifierServiceAttachRequest(
            session=sizes.session,
            num_slots=sizes.num_slots,
            num_pages=sizes.num_pages,
            max_model_len=sizes.max_model_len,
            max_batch_tokens=sizes.max_batch_tokens,
            feature_ring_rows=sizes.feature_ring_rows,
            max_draft_tokens=sizes.max_draft_tokens,
            feature_layer_ids=sizes.feature_layer_ids,
            draft_probs_arena=arenas.draft_probs,
            draft_to_target_arena=arenas.draft_to_target,
            masks_arena=sizes.masks_arena,
            blocks_arena=arenas.blocks,
            kv_page_bytes=sizes.kv_page_bytes,
        )
        with calling("verifier"):
            reply = self._transport.Attach(request, timeout=self._timeout_s)
        self._session, self._epoch = sizes.session, reply.epoch
        return str(reply.features_arena)

    def send(self, call: StepCall, metadata: Metadata = ()) -> None:
        """Puts a step on its way: one forward and acceptance. Raises ExecutorError."""
        request = verifier_pb2.StepRequest(
            session=self._session,
            epoch=self._epoch,
            step_id=call.step_id,
            slots=_updates_to_pb(call.updates),
            row_slots=call.row_slots,
            row_starts=call.row_starts,
            row_num_tokens=call.row_num_tokens,
            row_num_drafts=call.row_num_drafts,
            row_emits=call.row_emits,
            row_rounds=call.row_rounds,
            token_ids=call.token_ids,
            row_chained=call.row_chained,
            row_masked=call.row_masked,
            prob_rows=call.prob_asks.rows,
            prob_positions=call.prob_asks.positions,
            prob_token_ids=call.prob_asks.token_ids,
            block_rows=[block.row for block in call.blocks],
            block_max_drafts=[block.max_drafts for block in call.blocks],
            block_weights=[block.weight for block in call.blocks],
            verify_budget=call.verify_budget,
        )
        with calling("verifier"):
            self._steps.send(request, self._timeout_s, metadata)
        self._sent.append((len(call.row_slots), call.prob_asks))

    def receive(self) -> StepResult:
        """The result of the oldest step in flight. Raises ExecutorError; then no step is in flight any more."""
        num_rows, asks = self._sent.popleft()
        with calling("verifier"):
            response = self._steps.receive(self._timeout_s)
        if len(response.verify_lens) != num_rows or len(response.accepted_lens) != num_rows:
            raise ExecutorError(f"the verifier answered {len(response.verify_lens)} rows for {num_rows}")
        probs, num_asks = np.frombuffer(response.target_probs, "<f4"), len(asks.rows)
        if probs.size != num_asks:
            raise ExecutorError(f"the verifier answered {probs.size} target probabilities, {num_asks} were asked for")
        timings = {timing.phase: timing.duration_ns for timing in response.timings}
        return StepResult(
            response.verify_lens,
            _numbers(response.accepted_lens),
            _numbers(response.token_ids),
            {failure.row: failure.reason for failure in response.failures},
            timings.get("forward", 0) + timings.get("head", 0),
            timings.get("accept", 0),
            [Phase(each.phase, each.start_ns, each.start_ns + each.duration_ns) for each in response.timings],
            {each.row: scores_from_pb(each.scores) for each in response.scores},
            {each.row: scores_from_pb(each.scores) for each in response.prompt_scores},
            TargetProbs(asks, probs),
        )


class DrafterClient:
    """Calls the drafter."""

    def __init__(self, transport: Any, timeout_s: float) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self._drafts = transport.exchange("Draft")
        self._session = self._epoch = 0

    def info(self) -> DrafterInfo:
        """What is loaded."""
        request = drafter_pb2.DrafterServiceGetInfoRequest()
        with calling("drafter"):
            reply = self._transport.GetInfo(request, timeout=self._timeout_s)
        return DrafterInfo(
            contract_version=reply.contract_version,
            model=reply.model,
            block_size=reply.block_size,
            target_vocab_size=reply.target_vocab_size,
            target_hidden_size=reply.target_hidden_size,
            target_layer_ids=tuple(reply.target_layer_ids),
            num_target_layers=reply.num_target_layers,
            page_bytes=reply.page_bytes,
            page_size=reply.page_size,
            elastic_block_sizes=tuple(sorted(reply.elastic_block_sizes)),
            fingerprint=reply.fingerprint,
            weight_format=reply.weight_format,
            device=reply.device,
            calibration=reply.calibration,
            publishes_blocks=reply.publishes_blocks,
        )

    def attach(self, sizes: SessionSizes, features_arena: str) -> DraftArenas:
        """Starts a session over the verifier's feature arena."""
        request = drafter_pb2.DrafterServiceAttachRequest(
            session=sizes.session,
            num_slots=sizes.num_slots,
            num_pages=sizes.num_pages,
            max_model_len=sizes.max_model_len,
            features_arena=features_arena,
            kv_page_bytes=sizes.kv_page_bytes,
        )
        with calling("drafter"):
            reply = self._transport.Attach(request, timeout=self._timeout_s)
        self._session, self._epoch = sizes.session, reply.epoch
        return DraftArenas(reply.draft_probs_arena, reply.draft_to_target_arena, reply.blocks_arena)

    def send(self, call: DraftCall, metadata: Metadata = ()) -> None:
        """Puts a call on its way: ingests, then drafts. Raises ExecutorError."""
        request = drafter_pb2.DraftRequest(
            session=self._session,
            epoch=self._epoch,
            step_id=call.step_id,
            slots=_updates_to_pb(call.updates),
            ingest_slots=call.ingest_slots,
            ingest_starts=call.ingest_starts,
            ingest_counts=call.ingest_counts,
            ingest_oldest_step_ids=call.ingest_oldest_step_ids,
            ingest_newest_step_ids=call.ingest_newest_step_ids,
            row_slots=call.row_slots,
            row_anchor_ids=call.row_anchor_ids,
            row_anchor_positions=call.row_anchor_positions,
            row_rounds=call.row_rounds,
            num_draft_tokens=call.num_draft_tokens,
            publishes_blocks=call.publishes_blocks,
            confidence_odds=b"" if call.confidence_odds is None else call.confidence_odds.astype("<f8").tobytes(),
        )
        with calling("drafter"):
            self._drafts.send(request, self._timeout_s, metadata)

    def receive(self, call: DraftCall) -> DraftResult:
        """The result of `call`, which was sent. Raises ExecutorError."""
        with calling("drafter"):
            response = self._drafts.receive(self._timeout_s)
        shape = (len(call.row_slots), call.num_draft_tokens)
        confidences = np.frombuffer(response.confidences, "<f4")
        if len(response.token_ids) != shape[0] * shape[1] or confidences.size != shape[0] * shape[1]:
            raise ExecutorError(
                f"the drafter answered {len(response.token_ids)} tokens and {confidences.size} confidences for "
                f"{shape[0]} rows of {shape[1]}"
            )
        draft_probs = np.frombuffer(response.draft_probs, "<f4")
        if draft_probs.size not in (0, shape[0] * shape[1]):
            raise ExecutorError(f"the drafter answered {draft_probs.size} draft probabilities for {shape[0]} rows")
        if not draft_probs.size:
            draft_probs = np.full(shape, np.nan, np.float32)
        timings = {timing.phase: timing.duration_ns for timing in response.timings}
        return DraftResult(
            _numbers(response.token_ids),
            confidences.reshape(shape),
            draft_probs.reshape(shape),
            {failure.row: failure.reason for failure in response.ingest_failures},
            timings.get("ingest", 0) + timings.get("backbone", 0) + timings.get("head", 0),
        )


def _numbers(repeated: Any) -> list[int]:
    """Of a repeated field. By way of an array, which takes a third of the time."""
    numbers: list[int] = np.array(repeated).tolist()
    return numbers


def _updates_to_pb(updates: SlotUpdates) -> types_pb2.SlotUpdates:
    return types_pb2.SlotUpdates(
        releases=updates.releases,
        admissions=[
            types_pb2.SlotAdmission(
                slot=slot,
                regime=_REGIMES[sampling.regime],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                key=sampling.key,
                target=_target_to_pb(updates.targets[slot]) if slot in updates.targets else None,
            )
            for slot, sampling in updates.admissions.items()
        ],
        page_slots=updates.page_slots,
        page_indices=updates.page_indices,
        page_ids=updates.page_ids,
    )


def _target_to_pb(target: TargetOptions) -> types_pb2.TargetOptions:
    controls = target.controls
    return types_pb2.TargetOptions(
        repetition_penalty=controls.repetition_penalty,
        frequency_penalty=controls.frequency_penalty,
        presence_penalty=controls.presence_penalty,
        bias_token_ids=[token_id for token_id, _ in controls.bias],
        bias_values=[bias for _, bias in controls.bias],
        banned_sequences=[types_pb2.TokenSequence(token_ids=sequence) for sequence in controls.banned_sequences],
        min_tokens=controls.min_tokens,
        stop_token_ids=controls.stop_token_ids,
        text_token_ids=target.text_ids,
        num_prompt_tokens=target.num_prompt,
        num_logprobs=target.num_logprobs,
        num_prompt_logprobs=target.num_prompt_logprobs,
    )
