"""The drafter's engine: one session at a time, all tensor work on one thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.model import PAGE_SIZE, BlockForward, DraftCache, DrafterModel
from drafter_service.pair import Pair
from drafter_service.records import (
    DraftResult,
    DraftRows,
    DraftTimings,
    DraftWork,
    Ingests,
    SessionArenas,
    SessionSizes,
)
from drafter_service.session import Session
from drafter_service.weights import load_weights
from kernels.linear import WeightFormat
from kernels.markov_sample import BlockDraft
from kernels.markov_sample.reference import sample_block
from kernels.registry import Implementation, load_ops
from kernels.sampling import Regime, SlotSampling
from service_kit.cpu import available_cores
from service_kit.engine_thread import EngineThread, StepReplies
from service_kit.errors import InvalidRequestError, SessionMismatchError


class DrafterEngine:
    """A loaded drafter. Every method may be called from any thread."""

    def __init__(
        self, pair: Pair, *, weight_format: WeightFormat = "fp16", kernels: Implementation = "auto", threads: int = 0
    ) -> None:
        """Reads and packs the weights of a checked pair; 0 threads means every core this process may use.

        Raises ConfigurationError for a corrupt tensor.
        """
        self.name, self.fingerprint, self.config = pair.drafter.name, pair.drafter.fingerprint, pair.config
        self.weight_format: WeightFormat = weight_format
        self.threads = threads or available_cores()
        self.epoch = secrets.randbits(64) | 1
        self._thread = EngineThread("drafter-engine")
        self._replies: StepReplies[DraftResult] = StepReplies(self._thread)
        self._session: Session | None = None

        def load() -> DrafterModel:
            torch.set_num_threads(self.threads)
            return DrafterModel(pair.config, load_weights(pair, weight_format), load_ops(kernels))

        self.model = self._thread.submit(load).result()

    def warm_up(self) -> None:
        """Runs every operation once on a scratch page, so that no request waits for a compiler."""

        def run() -> None:
            cache = DraftCache(self.config, num_pages=1, num_positions=PAGE_SIZE)
            first, page_table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
            with torch.inference_mode():
                self.model.ingest(torch.zeros(1, self.config.feature_size), first, first, page_table, cache)
                for size in self.config.elastic_block_sizes:
                    forward = self.model.forward_block(first.long(), first + 1, first, size, page_table, cache)
                for regime in Regime:
                    probs = np.empty(forward.base_logits.shape[1:], np.float32)
                    ids = np.zeros(1, np.int64)
                    rows = DraftRows(slots=ids, anchor_ids=ids, anchor_positions=ids + 1, rounds=ids)
                    self._sample(forward, rows, [SlotSampling(regime)], [probs])

        self._thread.submit(run).result()

    def attach(self, session_id: int, sizes: SessionSizes, features_arena: str) -> SessionArenas:
        """Starts or continues a session over a feature ring; idempotent.

        Another session drops the last one whole. A new ring within a session (the verifier restarted) is mapped and the
        arenas that the verifier reads are made anew; slots and draft K/V stay.
        Raises InvalidRequestError for impossible sizes, StaleArenaError for a ring of another session or shape.
        """
        return self._thread.submit(lambda: self._attach(session_id, sizes, features_arena)).result()

    def draft(self, session_id: int, epoch: int, step_id: int, work: DraftWork) -> DraftResult:
        """Runs one Draft call; a repeated step id is answered from the last result.

        Raises SessionMismatchError for another session or epoch, an older step id, or a slot without pages;
        InvalidRequestError for a block length or token id out of range.
        """
        self._current(session_id, epoch)
        return self._replies.call(step_id, lambda: self._draft(self._current(session_id, epoch), work))

    def close(self) -> None:
        """Ends the engine thread and drops the session."""
        self._thread.stop()
        if self._session is not None:
            self._session.close()
            self._session = None

    def _current(self, session_id: int, epoch: int) -> Session:
        if epoch != self.epoch:
            raise SessionMismatchError(f"epoch {epoch} is not this drafter's ({self.epoch}): attach again")
        if self._session is None or self._session.id != session_id:
            raise SessionMismatchError(f"session {session_id} is not attached")
        return self._session

    def _attach(self, session_id: int, sizes: SessionSizes, features_arena: str) -> SessionArenas:
        if min(session_id, *sizes) < 1:
            raise InvalidRequestError(f"session and sizes must be positive, not {session_id} and {tuple(sizes)}")
        session = self._session
        if session is None or session.id != session_id:
            if session is not None:
                session.close()
            self._session = session = None  # its pages go before new ones come
            session = Session(session_id, sizes, self.config)
            self._replies.reset()
        elif session.sizes != sizes:
            raise InvalidRequestError(f"session {session_id} has sizes {tuple(session.sizes)}, not {tuple(sizes)}")
        arenas = session.map_ring(features_arena, self.model.weights.draft_to_target, self.epoch)
        self._session = session
        return arenas

    def _draft(self, session: Session, work: DraftWork) -> DraftResult:
        started = time.perf_counter_ns()
        rows, ingests = work.rows, work.ingests
        self._check(work)
        session.slots.apply(work.slots)
        for slot, start, count in zip(ingests.slots, ingests.starts, ingests.counts, strict=True):
            session.slots.require_span(int(slot), int(start), int(count))
        for slot, position in zip(rows.slots, rows.anchor_positions, strict=True):
            session.slots.require_span(int(slot), 0, int(position))
        with torch.inference_mode():
            failures = self._ingest(session, ingests)
            ingested = time.perf_counter_ns()
            block, backbone_ns = self._draft_rows(session, rows, work.num_drafts)
        ended = time.perf_counter_ns()
        timings = DraftTimings(
            ingest=ingested - started,
            backbone=backbone_ns,
            head=ended - ingested - backbone_ns,
            total=ended - started,
        )
        return DraftResult(block.token_ids, calibrated(block.confidence_logits), failures, timings)

    def _check(self, work: DraftWork) -> None:
        rows, block_size = work.rows, self.config.block_size
        if len(rows.slots) and not 1 <= work.num_drafts <= block_size:
            raise InvalidRequestError(
                f"num_draft_tokens must be 1 ... {block_size}, not {work.num_drafts}", field="num_draft_tokens"
            )
        if rows.anchor_ids.max(initial=0) >= self.config.vocab_size:
            raise InvalidRequestError(
                f"anchor id {rows.anchor_ids.max()} is outside the vocabulary of {self.config.vocab_size}",
                field="row_anchor_ids",
            )

    def _ingest(self, session: Session, ingests: Ingests) -> dict[int, str]:
        if not len(ingests.slots):
            return {}
        read = session.read_features(ingests)
        self.model.ingest(
            torch.from_numpy(read.features),
            torch.from_numpy(read.positions.astype(np.int32)),
            torch.from_numpy(read.slots.astype(np.int32)),
            session.page_table,
            session.cache,
        )
        return read.failures

    def _draft_rows(self, session: Session, rows: DraftRows, num_drafts: int) -> tuple[BlockDraft, int]:
        """Drafts, and the parallel backbone's share of the time in nanoseconds."""
        if not len(rows.slots):
            return BlockDraft(np.empty((0, num_drafts), np.uint32), np.empty((0, num_drafts), np.float32)), 0
        started = time.perf_counter_ns()
        forward = self.model.forward_block(
            torch.from_numpy(rows.anchor_ids),
            torch.from_numpy(rows.anchor_positions.astype(np.int32)),
            torch.from_numpy(rows.slots.astype(np.int32)),
            num_drafts,
            session.page_table,
            session.cache,
        )
        backbone_ns = time.perf_counter_ns() - started
        sampling: list[SlotSampling] = []
        draft_probs_out: list[npt.NDArray[np.float32] | None] = []
        for slot, position, round_ in zip(rows.slots, rows.anchor_positions, rows.rounds, strict=True):
            constants = session.slots.sampling[slot]
            assert constants is not None  # the span check saw to it
            sampling.append(constants)
            is_rejection = constants.regime == Regime.REJECTION
            draft_probs_out.append(session.draft_probs_of(slot, round_, position + 1) if is_rejection else None)
        return self._sample(forward, rows, sampling, draft_probs_out), backbone_ns

    def _sample(
        self,
        forward: BlockForward,
        rows: DraftRows,
        sampling: Sequence[SlotSampling],
        draft_probs_out: Sequence[npt.NDArray[np.float32] | None],
    ) -> BlockDraft:
        weights = self.model.weights
        return sample_block(
            forward.base_logits.numpy(),
            forward.hidden.numpy(),
            weights.markov,
            weights.confidence,
            rows.anchor_ids.astype(np.uint32),
            sampling,
            rows.anchor_positions,
            rows.rounds,
            weights.draft_to_target,
            draft_probs_out,
        )


def calibrated(confidence_logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Confidences of logits [B, n]: the one place where calibration acts. NaN stays NaN: the window ends there."""
    with np.errstate(over="ignore"):
        confidences: npt.NDArray[np.float32] = np.float32(1) / (1 + np.exp(-confidence_logits))
    return confidences
