"""The verifier's engine: sessions, steps and their answers. All tensor work happens on one engine thread."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from prometheus_client.metrics_core import Metric
from torch import Tensor

from kernels import draws
from service_kit.cpu import available_memory_bytes
from service_kit.engine_thread import EngineThread
from service_kit.errors import ConfigurationError, InvalidRequestError, SessionMismatchError
from service_kit.handoff import KEEPS_STORE_ORDER
from verifier_service.acceptance import accept
from verifier_service.block_windows import block_windows, check_blocks, missing_blocks, settle
from verifier_service.draft_source import DraftArenas
from verifier_service.loading import LoadedTarget
from verifier_service.metrics import StepCounts, verifier_metrics
from verifier_service.model import PAGE_SIZE, TokenRows
from verifier_service.prompt_scores import score_prompts
from verifier_service.session import Session
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import (
    Acceptance,
    Phase,
    StepBatch,
    StepResult,
    emitted_rows,
    fill_chained,
    token_rows,
    validate,
)

if TYPE_CHECKING:
    from verifier_service.device_step import DeviceStep

_PHASES = ("forward", "features", "head", "accept")
_DEVICE_PHASES = ("forward", "accept")
"""The whole captured step, then what is left for the host."""
_WARM_UP_ROWS = range(1, 9)
_WARM_UP_CONTEXT = 40
_DEFAULT_WINDOW = 8
_MAX_PROFILE_TOKENS, _MAX_PROFILE_REPEATS = 4096, 1000


class Attachment(NamedTuple):
    """Answer to Attach."""

    epoch: int
    features_arena: str


class VerifierEngine:
    """Serves one target to one scheduler session at a time. Methods may be called from any thread."""

    def __init__(self, target: LoadedTarget, thread: EngineThread) -> None:
        """`thread` is the one the target was loaded on; the engine does not stop it."""
        self.target = target
        self.epoch = secrets.randbits(63) | 1
        self._thread = thread
        self._session: Session | None = None
        self._captured: DeviceStep | None = None
        """Steps of the session, where they run on a GPU."""
        self._counts = StepCounts()

    @property
    def sets_verify_lens(self) -> bool:
        """Whether steps can settle verify lengths by the drafter's blocks."""
        return KEEPS_STORE_ORDER

    def metrics(self) -> Iterable[Metric]:
        """What steps did so far, and the memory of the session."""
        session = self._session
        num_pages, arena_bytes = (session.sizes.num_pages, session.arena_bytes) if session else (0, {})
        return verifier_metrics(self._counts, arena_bytes, num_pages * self.target.model.page_bytes)

    def attach(self, session: int, sizes: SessionSizes, draft_arenas: DraftArenas, masks_arena: str = "") -> Attachment:
        """Starts a session or, within it, maps arenas that are new. Runs after any step in flight.

        Raises ConfigurationError for sizes that cannot be had, SessionMismatchError for other sizes within a session.
        """
        return self._thread.submit(lambda: self._attach(session, sizes, draft_arenas, masks_arena)).result()

    @torch.inference_mode()
    def _attach(
        self, session: int, sizes: SessionSizes, draft_arenas: DraftArenas, masks_arena: str = ""
    ) -> Attachment:
        if self._session is None or self._session.session != session:
            self._drop_session()  # before the new one takes memory
            self._session = Session(session, self.epoch, sizes, self.target.model, self._thread, self.target.gpu)
            self._captured = self._device_step(self._session)
        elif self._session.sizes != sizes:
            raise SessionMismatchError("the sizes of a session cannot change: start a new session", field="session")
        self._session.attach_drafter(draft_arenas)
        self._session.masks.attach(masks_arena)
        if self._captured is not None and (draft_arenas.draft_probs or not sizes.max_draft_tokens):
            self._captured.require(self._session)
        return Attachment(self.epoch, self._session.features_arena)

    def _device_step(self, session: Session) -> DeviceStep | None:
        """What runs the session's steps on the target's GPU, if it is on one."""
        if self.target.gpu is None:
            return None
        from verifier_service.device_step import DeviceStep

        return DeviceStep(self.target.model, session.sizes, session.space, self.target.gpu)

    def _drop_session(self) -> None:
        self._captured = None
        if self._session:
            self._session.close()
        self._session = None

    def step(self, batch: StepBatch) -> StepResult:
        """Runs a step once, however often it is asked for.

        Raises SessionMismatchError for another session, epoch or an older step, InvalidRequestError for bad rows.
        """
        session = self._session
        if session is None or batch.session != session.session or batch.epoch != self.epoch:
            raise SessionMismatchError("the step is for another session or epoch: attach first", field="session")
        check_blocks(batch, session.sizes)
        windows = block_windows(batch)

        def wait() -> None:
            if len(windows):
                session.blocks.wait(windows, lambda: session is not self._session)

        # Replies belong to their session: a late step of an older one cannot disturb the new one's ids.
        return session.replies.call(batch.step_id, lambda: self._step(session, batch), wait)

    @torch.inference_mode()
    def _step(self, session: Session, batch: StepBatch) -> StepResult:
        if session is not self._session:
            raise SessionMismatchError("the session ended while the step waited", field="session")
        started = time.perf_counter_ns()
        session.update_slots(batch.slots)
        missing = missing_blocks(session, batch)
        if self._captured is None or session.blocks.device_rows is None:
            batch = settle(session, batch, missing, self.target.verify_lens)
        sizes, model = session.sizes, self.target.model
        max_row_tokens = sizes.feature_ring_rows or sizes.max_batch_tokens
        validate(batch, session.slots, session.vocab_size, sizes.max_batch_tokens, max_row_tokens)
        emissions, session.emissions = session.emissions, {}
        failed = fill_chained(batch, emissions) | missing
        rows, emitted = token_rows(batch), emitted_rows(batch)
        if self._captured is not None:
            self._captured.require(session)
            replaying = time.perf_counter_ns()
            accepted = self._captured.run(session, batch, rows, emitted, failed)
            clocks = [replaying, self._captured.replayed_ns, time.perf_counter_ns()]
            return self._answer(session, batch, accepted, _DEVICE_PHASES, clocks, started)

        clocks = [time.perf_counter_ns()]
        hidden = model.forward(rows, session.page_table, session.space)
        clocks.append(time.perf_counter_ns())
        if session.ring:
            session.ring.write(batch.step_id, rows, session.space.features)
        clocks.append(time.perf_counter_ns())
        num_logits = len(emitted.token_rows)
        needed = hidden if num_logits == len(hidden) else hidden[torch.from_numpy(emitted.token_rows)]
        logits = model.logits(needed) if num_logits else needed.new_empty(0, session.vocab_size)
        clocks.append(time.perf_counter_ns())
        accepted = accept(session, batch, emitted, logits, self.target.accept_row, failed)
        accepted.prompt_scores = score_prompts(session, batch, hidden, model.logits)
        clocks.append(time.perf_counter_ns())
        return self._answer(session, batch, accepted, _PHASES, clocks, started)

    def _answer(
        self,
        session: Session,
        batch: StepBatch,
        accepted: Acceptance,
        names: Sequence[str],
        clocks: Sequence[int],
        started: int,
    ) -> StepResult:
        """The step's answer; phase i lies between clocks i and i + 1."""
        session.emissions = accepted.emissions
        phases = [Phase(name, *span) for name, span in zip(names, itertools.pairwise(clocks), strict=True)]
        result = StepResult(accepted, [*phases, Phase("total", started, clocks[-1])])
        self._counts.add(batch, result)
        return result

    def profile(self, num_tokens: int, context_len: int, repeats: int) -> list[int]:
        """Times forwards with logits for every row, in nanoseconds, on scratch pages.

        Rows are verify windows of max_draft_tokens + 1 (before Attach: of 8), each window in its own slot, and end at
        `context_len` positions. Raises InvalidRequestError for a shape that cannot be had.
        """
        return self._thread.submit(lambda: self._profile(num_tokens, context_len, repeats)).result()

    @torch.inference_mode()
    def _profile(self, num_tokens: int, context_len: int, repeats: int) -> list[int]:
        config = self.target.model.config
        if not 1 <= num_tokens <= _MAX_PROFILE_TOKENS or not 1 <= repeats <= _MAX_PROFILE_REPEATS:
            raise InvalidRequestError(
                f"num_tokens must be 1 ... {_MAX_PROFILE_TOKENS}, repeats 1 ... {_MAX_PROFILE_REPEATS}",
                field="num_tokens",
            )
        if not 1 <= context_len <= config.max_position:
            raise InvalidRequestError(f"context_len must be 1 ... {config.max_position}", field="context_len")
        window = self._session.sizes.max_draft_tokens + 1 if self._session else _DEFAULT_WINDOW
        forward = self._replayed(self._scratch_forward(num_tokens, context_len, min(window, context_len)))
        forward()  # commits the pages' memory
        durations = []
        for _ in range(repeats):
            started = time.perf_counter_ns()
            forward()
            durations.append(time.perf_counter_ns() - started)
        return durations

    def _replayed(self, forward: Callable[[], Tensor]) -> Callable[[], object]:
        """`forward` as steps run it: on a GPU from a graph, and waited for."""
        if (gpu := self.target.gpu) is None:
            return forward
        replay = gpu.runner.record(forward)

        def replay_and_wait() -> None:
            replay()
            gpu.runner.synchronize()

        return replay_and_wait

    def _scratch_forward(self, num_tokens: int, context_len: int, window: int) -> Callable[[], Tensor]:
        """A forward with logits over pages of its own: windows of rows that end at `context_len` positions."""
        model, config = self.target.model, self.target.model.config
        num_slots, pages_per_slot = -(-num_tokens // window), -(-context_len // PAGE_SIZE)
        num_pages = num_slots * pages_per_slot
        gpu, device = self.target.gpu, model.weights.embedding.device
        if num_pages * model.page_bytes > (gpu.free_bytes() if gpu else available_memory_bytes()):
            raise InvalidRequestError(f"{num_pages} scratch pages are more than the free memory", field="context_len")
        space = model.workspace(num_pages, context_len, num_tokens)
        page_table = torch.arange(num_pages, dtype=torch.int32, device=device).view(num_slots, pages_per_slot)
        index = torch.arange(num_tokens, device=device)
        positions = context_len - window + index % window
        rows = TokenRows(index % config.vocab_size, positions.int(), (index // window).int())
        return lambda: model.logits(model.forward(rows, page_table, space))

    def warm_up(self) -> None:
        """Runs small forwards, so that the first request meets compiled kernels and touched weights.

        Raises ConfigurationError if their logits are not finite: weights this format or these kernels cannot carry.
        """
        self._thread.submit(self._warm_up).result()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        draws.warm_up()
        context_len = min(_WARM_UP_CONTEXT, self.target.model.config.max_position)
        # On a GPU the capture of a session's steps warms them up: one forward shows whether it can carry the weights.
        for num_tokens in _WARM_UP_ROWS if self.target.gpu is None else (1,):
            if not self._scratch_forward(num_tokens, context_len, min(num_tokens, context_len))().isfinite().all():
                raise ConfigurationError(
                    f"{self.target.name}: logits of a trial forward are not finite in weight format "
                    f"{self.target.weight_format}: try float32",
                    field="weight_format",
                )

    def close(self) -> None:
        """Ends the session and its shared memory, after the work already queued."""
        self._thread.submit(self._drop_session).result()
