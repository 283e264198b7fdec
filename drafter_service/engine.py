"""The drafter's engine: one session at a time, all tensor work on one engine thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from prometheus_client.metrics_core import Metric

from drafter_service.loading import LoadedDrafter
from drafter_service.metrics import DraftCounts, drafter_metrics
from drafter_service.records import (
    DraftResult,
    DraftRows,
    DraftTimings,
    DraftWork,
    Ingests,
    IntArray,
    SessionArenas,
    SessionSizes,
)
from drafter_service.session import Session
from kernels.markov_sample import BlockDraft
from kernels.sampling import Regime, SlotSampling
from kernels.survivals import corrected, survivals
from service_kit.engine_thread import EngineThread
from service_kit.errors import InvalidRequestError, SessionMismatchError
from service_kit.handoff import KEEPS_STORE_ORDER

if TYPE_CHECKING:
    from drafter_service.device_draft import DeviceDraft


class DrafterEngine:
    """Serves one drafter to one scheduler session at a time. Methods may be called from any thread."""

    def __init__(self, drafter: LoadedDrafter, thread: EngineThread) -> None:
        """`thread` is the one the drafter was loaded on; the engine does not stop it."""
        self.drafter = drafter
        self.epoch = secrets.randbits(63) | 1
        self._model, self._config = drafter.model, drafter.model.config
        self._draft_index = _inverse(self._model.weights.draft_to_target, self._config.vocab_size)
        self._thread = thread
        self._session: Session | None = None
        self._captured: DeviceDraft | None = None
        """Calls of the session, where they run on a GPU."""
        self._counts = DraftCounts()

    @property
    def publishes_blocks(self) -> bool:
        """Whether calls can publish blocks for a verifier that settles lengths itself."""
        return KEEPS_STORE_ORDER

    def metrics(self) -> Iterable[Metric]:
        """What calls did so far, and the memory of the session."""
        session = self._session
        num_pages, arena_bytes = (session.sizes.num_pages, session.arena_bytes) if session else (0, {})
        return drafter_metrics(self._counts, arena_bytes, num_pages * self._model.page_bytes)

    def attach(self, session_id: int, sizes: SessionSizes, features_arena: str) -> SessionArenas:
        """Starts or continues a session over a feature ring; idempotent. Runs after any call in flight.

        Another session drops the last one whole. A new ring within a session (the verifier restarted) is mapped and the
        arenas that the verifier reads are made anew; slots and draft K/V stay.
        Raises InvalidRequestError for impossible sizes, SessionMismatchError for other sizes within a session,
        StaleArenaError for a ring of another session or shape.
        """
        return self._thread.submit(lambda: self._attach(session_id, sizes, features_arena)).result()

    def _attach(self, session_id: int, sizes: SessionSizes, features_arena: str) -> SessionArenas:
        if min(session_id, sizes.num_slots, sizes.num_pages, sizes.max_model_len) < 1:
            raise InvalidRequestError(f"session and sizes must be positive, not {session_id} and {tuple(sizes)[:3]}")
        session = self._session
        if session is None or session.id != session_id:
            self._drop_session()  # before the new one takes memory
            session = Session(session_id, sizes, self._model, self._thread, self.drafter.gpu)
            self._captured = self._device_draft(session)
        elif session.sizes != sizes:
            raise SessionMismatchError("the sizes of a session cannot change: start a new session", field="session")
        arenas = session.map_ring(features_arena, self._model.weights.draft_to_target, self.epoch)
        if self._captured is not None:
            self._captured.require(session)
        self._session = session
        return arenas

    def _device_draft(self, session: Session) -> DeviceDraft | None:
        """What runs the session's calls on the drafter's GPU, if it is on one."""
        if self.drafter.gpu is None:
            return None
        from drafter_service.device_draft import DeviceDraft

        return DeviceDraft(self._model, self.drafter.calibration, session, self.drafter.gpu)

    def _drop_session(self) -> None:
        self._captured = None
        if self._session is not None:
            self._session.close()
        self._session = None

    def close(self) -> None:
        """Gives back the session's shared memory."""
        self._thread.submit(self._drop_session).result()

    def draft(self, session_id: int, epoch: int, step_id: int, work: DraftWork) -> DraftResult:
        """Runs one Draft call once, however often it is asked for.

        Raises SessionMismatchError for another session or epoch, an older step id, or a slot without pages;
        InvalidRequestError for a block length or token id out of range.
        """
        session = self._session
        if session is None or session.id != session_id or epoch != self.epoch:
            raise SessionMismatchError("the call is for another session or epoch: attach first", field="session")
        # Replies belong to their session: a late call of an older one cannot disturb the new one's ids.
        return session.replies.call(step_id, lambda: self._draft(session, work))

    @torch.inference_mode()
    def _draft(self, session: Session, work: DraftWork) -> DraftResult:
        if session is not self._session:
            raise SessionMismatchError("the session ended while the call waited", field="session")
        started = time.perf_counter_ns()
        self._check(work)
        session.apply(work.slots)
        rows, ingests = work.rows, work.ingests
        for slot, start, count in zip(ingests.slots, ingests.starts, ingests.counts, strict=True):
            session.slots.require_span(int(slot), int(start), int(count))
        for slot, position in zip(rows.slots, rows.anchor_positions, strict=True):
            session.slots.require_span(int(slot), 0, int(position))
        failures = self._ingest(session, ingests)
        ingested = time.perf_counter_ns()
        odds = None
        if work.confidence_odds is not None and len(rows.slots):
            is_lost = np.isin(rows.slots, ingests.slots[list(failures)])
            odds = np.where(is_lost[:, None], np.nan, work.confidence_odds)  # so that nothing of theirs survives
        block, draft_probs, backbone_ns = self._draft_rows(session, rows, work.num_drafts, odds)
        confidences = self.drafter.calibration.confidences(block.confidence_logits, _regimes(session, rows))
        if odds is not None:
            if self._captured is None:
                session.write_blocks(rows, block.token_ids, survivals(corrected(confidences, odds)))
            session.stamp_blocks(rows)
        ended = time.perf_counter_ns()
        timings = DraftTimings(
            ingest=ingested - started,
            backbone=backbone_ns,
            head=ended - ingested - backbone_ns,
            total=ended - started,
        )
        result = DraftResult(block.token_ids, confidences, draft_probs, failures, timings)
        self._counts.add(work, result)
        return result

    def _check(self, work: DraftWork) -> None:
        anchor_ids, block_size = work.rows.anchor_ids, self._config.block_size
        if len(anchor_ids) and not 1 <= work.num_drafts <= block_size:
            raise InvalidRequestError(
                f"num_draft_tokens must be 1 ... {block_size}, not {work.num_drafts}", field="num_draft_tokens"
            )
        if (largest := anchor_ids.max(initial=0)) >= self._config.vocab_size:
            raise InvalidRequestError(
                f"anchor id {largest} is outside the vocabulary of {self._config.vocab_size}", field="row_anchor_ids"
            )

    def _ingest(self, session: Session, ingests: Ingests) -> dict[int, str]:
        if not len(ingests.slots):
            return {}
        read = session.read_features(ingests)
        if self._captured is not None:
            self._captured.ingest(session, read)
            return read.failures
        self._model.ingest(
            torch.from_numpy(read.features),
            torch.from_numpy(read.positions.astype(np.int32)),
            torch.from_numpy(read.slots.astype(np.int32)),
            session.page_table,
            session.cache,
        )
        return read.failures

    def _draft_rows(
        self, session: Session, rows: DraftRows, num_drafts: int, odds: npt.NDArray[np.float64] | None
    ) -> tuple[BlockDraft, npt.NDArray[np.float32], int]:
        """Drafts, their probabilities (`DraftResult`), and the parallel backbone's time in nanoseconds. On a GPU the
        blocks are published as well, unless `odds` are None (`DraftWork`)."""
        no_probs = np.empty(0, np.float32)
        if not len(rows.slots):
            return BlockDraft(np.empty((0, num_drafts), np.uint32), np.empty((0, num_drafts), np.float32)), no_probs, 0
        if self._captured is not None:
            return *self._captured.draft(session, rows, num_drafts, odds), 0
        started = time.perf_counter_ns()
        forward = self._model.forward_block(
            torch.from_numpy(rows.anchor_ids),
            torch.from_numpy(rows.anchor_positions.astype(np.int32)),
            torch.from_numpy(rows.slots.astype(np.int32)),
            num_drafts,
            session.page_table,
            session.cache,
        )
        backbone_ns = time.perf_counter_ns() - started
        sampling: list[SlotSampling] = []
        probs_out: list[npt.NDArray[np.float32] | None] = []
        for slot, position, round_ in zip(rows.slots, rows.anchor_positions, rows.rounds, strict=True):
            constants = session.slots.sampling[slot]
            assert constants is not None  # the span check saw to it
            sampling.append(constants)
            is_rejection = constants.regime == Regime.REJECTION
            probs_out.append(session.draft_probs_of(slot, round_, position + 1) if is_rejection else None)
        block = self._model.sample(forward, rows.anchor_ids, sampling, rows.anchor_positions, rows.rounds, probs_out)
        is_sampled = any(rows is not None for rows in probs_out)
        return block, self._draft_probs(block, probs_out) if is_sampled else no_probs, backbone_ns

    def _draft_probs(
        self, block: BlockDraft, probs_out: Sequence[npt.NDArray[np.float32] | None]
    ) -> npt.NDArray[np.float32]:
        """[B, num_drafts] probability of each draft in its distribution; NaN in rows without one."""
        columns = block.token_ids if self._draft_index is None else self._draft_index[block.token_ids]
        draft_probs = np.full(columns.shape, np.nan, np.float32)
        for own, rows, row_columns in zip(draft_probs, probs_out, columns, strict=True):
            if rows is not None:
                own[:] = rows[np.arange(len(own)), row_columns]
        return draft_probs


def _regimes(session: Session, rows: DraftRows) -> list[Regime]:
    """Of each row."""
    samplings = [session.slots.sampling[slot] for slot in rows.slots]
    return [sampling.regime for sampling in samplings if sampling is not None]  # the span check saw to it


def _inverse(draft_to_target: npt.NDArray[np.uint32] | None, vocab_size: int) -> IntArray | None:
    """Draft index by target id, [vocab_size]; None for the identity."""
    if draft_to_target is None:
        return None
    index = np.zeros(vocab_size, np.int64)
    index[draft_to_target] = np.arange(len(draft_to_target))
    return index
