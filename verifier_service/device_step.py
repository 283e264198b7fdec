"""A session's steps on a GPU: forward, features, logits and acceptance of a whole step captured once per geometry.

The host fills one block of inputs, starts a graph and reads one block of outputs; nothing in between waits for it.
Steps in which a row has masks or logit controls, or asks for scores or probabilities, have graphs of their own, one for
each tier of tokens (`verifier_service.device_extras`): in most steps no row does, and those pay nothing for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.rejection_sample import InvalidRowError
from kernels.rejection_sample.triton import (
    DraftDistributions,
    WindowOutcomes,
    Windows,
    accept_rows,
    error_of,
    inverse_map,
)
from kernels.sampling import Regime
from kernels.triton.rows import SamplingRows
from kernels.verify_lens.triton import verify_lens
from service_kit.errors import StaleArenaError
from service_kit.gpu import Gpu
from service_kit.graphs import Geometry, StepGraphs, geometries, widest
from service_kit.staging import Field, Staging
from verifier_service.device_blocks import DeviceBlocks
from verifier_service.device_extras import DeviceExtras
from verifier_service.device_inputs import DeviceInputs
from verifier_service.model import TargetModel, TokenRows, Workspace
from verifier_service.prompt_scores import score_prompts
from verifier_service.session import Session
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import (
    Acceptance,
    Emission,
    EmittedRows,
    FailedRow,
    StepBatch,
    Window,
    token_rows,
    window_of,
)


class DeviceStep:
    """Inputs, outputs and graphs of a session's steps. Used on the engine thread only."""

    def __init__(self, model: TargetModel, sizes: SessionSizes, space: Workspace, gpu: Gpu) -> None:
        """Nothing is captured yet."""
        self._model, self._space, self._runner = model, space, gpu.runner
        vocab_size, shape = model.config.vocab_size, (sizes.max_batch_tokens, sizes.num_slots)
        self._plain = StepGraphs("step", gpu.runner, geometries(*shape))
        self._with_extras = StepGraphs("step with extras", gpu.runner, widest(*shape))
        self._inputs = DeviceInputs(sizes, gpu.device)
        self._blocks = DeviceBlocks(sizes, self._inputs.device, verify_lens, gpu)
        self._extras = DeviceExtras(sizes, vocab_size, gpu.device)
        rows = sizes.num_slots
        self._outputs = Staging(
            {
                "accepted_lens": Field((rows,)),
                "token_ids": Field((rows, sizes.max_draft_tokens + 1)),
                "statuses": Field((rows,)),
            },
            gpu.device,
        )
        like = space.residual
        self._gathered = like.new_empty(sizes.max_logit_rows, model.config.hidden_size)
        self._logits = like.new_empty(sizes.max_logit_rows, vocab_size)
        self._page_table: Tensor | None = None  # [num_slots, max_pages] int32
        self._arena_names: tuple[str, ...] = ()
        """Of what the graphs read."""
        self.replayed_ns = 0
        """When the last step's results were here."""

    def require(self, session: Session) -> None:
        """Captures every geometry, unless that was done over the arenas that the session has now.

        A drafter that is down has none: steps then run without.
        """
        if session.arena_names == self._arena_names:
            return
        self._page_table = session.page_table.to(self._logits.device, copy=True)
        self._inputs.blank()
        self._inputs.upload()
        self._extras.blank()
        self._extras.upload()
        for graphs, extras in ((self._plain, None), (self._with_extras, self._extras)):
            graphs.capture(partial(self._work, session, extras))
        if (blocks := session.blocks.device_rows) is not None:
            self._blocks.capture(blocks)
        self._arena_names = session.arena_names

    def _work(self, session: Session, extras: DeviceExtras | None, geometry: Geometry) -> partial[None]:
        """What a step of this shape does on the device."""
        drafts = None
        if (probs := session.drafts.device_probs) is not None:
            mapping = session.drafts.draft_to_target
            inverse = None if mapping is None else inverse_map(mapping, session.vocab_size).to(probs.device)
            drafts = DraftDistributions(probs, self._inputs.device["probs_slots"][: geometry.rows], inverse)
        return partial(
            self._run,
            self._inputs.tokens(geometry),
            session.ring.device_rows if session.ring else None,
            self._inputs.windows(geometry),
            self._inputs.sampling(geometry),
            drafts,
            WindowOutcomes(*(self._outputs.device[name][: geometry.rows] for name in WindowOutcomes._fields)),
            extras,
        )

    def _run(
        self,
        rows: TokenRows,
        ring: Tensor | None,
        windows: Windows,
        sampling: SamplingRows,
        drafts: DraftDistributions | None,
        outcomes: WindowOutcomes,
        extras: DeviceExtras | None,
    ) -> None:
        assert self._page_table is not None
        num_tokens, num_logits = len(rows.token_ids), len(windows.request_of_row)
        hidden = self._model.forward(rows, self._page_table, self._space)
        if ring is not None:
            ring.index_copy_(0, self._inputs.device["ring_rows"][:num_tokens], self._space.features[:num_tokens])
        gathered, logits = self._gathered[:num_logits], self._logits[:num_logits]
        torch.index_select(hidden, 0, self._inputs.device["logit_rows"][:num_logits], out=gathered)
        self._model.weights.lm_head(gathered, logits)
        if extras is None:
            accept_rows(logits, windows, sampling, drafts, outcomes)
            return
        asks = extras.asks(len(windows.row_starts))
        accept_rows(extras.change(logits, windows), windows, sampling, drafts, outcomes, asks)
        extras.score(logits, windows, outcomes)

    def run(
        self,
        session: Session,
        batch: StepBatch,
        rows: TokenRows,
        emitted: EmittedRows,
        failed: Mapping[int, str],
    ) -> Acceptance:
        """Runs a step; arguments as those of `accept`. Raises InvalidRequestError for one that no graph holds."""
        reasons = dict(failed)
        self._inputs.blank()
        self._extras.blank()
        self._inputs.fill_tokens(batch, rows, emitted)
        windows = _windows(batch, emitted)
        for place, (window, offset) in enumerate(zip(windows, emitted.offsets.tolist(), strict=True)):
            if window.row not in reasons:
                try:
                    self._fill_window(session, batch, window, place, offset)
                except (InvalidRowError, StaleArenaError) as error:
                    reasons[window.row] = str(error)
        self._replay(session, batch, max(1, len(windows)), reasons)
        if batch.blocks is not None:
            batch = self._blocks.settled(batch)
            rows, windows = token_rows(batch), _windows(batch, emitted)
        if session.ring:
            session.ring.write(batch.step_id, rows, self._space.features)
        self.replayed_ns = time.perf_counter_ns()
        result = self._read(batch, windows, reasons)
        hidden = self._space.normed[: len(batch.token_ids)]
        # Of prompts by parts and outside the graph: logits of a whole chunk have no place to lie.
        result.prompt_scores = score_prompts(
            session, batch, hidden, lambda some: self._model.logits(some).float().cpu()
        )
        return result

    def _replay(self, session: Session, batch: StepBatch, num_rows: int, reasons: Mapping[int, str]) -> None:
        has_extras, num_tokens = self._extras.is_used, len(batch.token_ids)
        if batch.blocks is not None:
            num_tokens += min(batch.blocks.budget, int(batch.blocks.max_drafts.sum()))
        graphs = self._with_extras if has_extras else self._plain
        geometry = graphs.fit(num_tokens, num_rows)
        self._update_pages(session)
        self._inputs.upload()
        if batch.blocks is not None:
            self._blocks.start(batch, reasons)
        if has_extras:
            self._extras.upload()
        graphs.replay(geometry)
        self._outputs.download()
        if has_extras:
            self._extras.download()
        self._runner.synchronize()

    def _fill_window(self, session: Session, batch: StepBatch, window: Window, place: int, offset: int) -> None:
        """Gives the device a window as request `place`, whose first logits are row `offset`.

        Raises InvalidRowError or StaleArenaError, with nothing given, if the row cannot be served.
        """
        sampling = session.sampling(window.slot)
        may_verify = len(window.draft_ids) > 0 or (batch.blocks is not None and window.row in batch.blocks.rows)
        has_draft_probs = may_verify and sampling.regime == Regime.REJECTION
        if has_draft_probs:
            session.drafts.require(window.slot, window.round, window.anchor + 1)
        self._extras.fill(session, batch, window, place)
        self._inputs.fill_window(window, sampling, place, offset, has_draft_probs=has_draft_probs)

    def _update_pages(self, session: Session) -> None:
        assert self._page_table is not None, "not captured"
        if changed := session.take_changed_slots():
            self._page_table[changed] = session.page_table[changed].to(self._page_table.device)

    def _read(self, batch: StepBatch, windows: Sequence[Window], reasons: Mapping[int, str]) -> Acceptance:
        """The answer to a step that was replayed; `reasons` names rows that were not given to the device, and why."""
        host, num_rows, num_asks = self._outputs.host, len(batch.row_slots), len(batch.prob_asks)
        result = Acceptance([0] * num_rows, [0] * num_rows, target_probs=np.full(num_asks, np.nan, np.float32))
        for place, window in enumerate(windows):
            reason = reasons.get(window.row, "")
            if not reason and (status := int(host["statuses"][place])):
                reason = error_of(status)
            if reason:
                result.failures.append(FailedRow(window.row, reason))
                continue
            accepted_len = int(host["accepted_lens"][place])
            result.verify_lens[window.row] = len(window.draft_ids)
            result.accepted_lens[window.row] = accepted_len
            result.token_ids += host["token_ids"][place, : accepted_len + 1].tolist()
            position = window.anchor + 1 + accepted_len
            result.emissions[window.slot] = Emission(position, result.token_ids[-1])
            if self._extras.is_used:
                self._extras.read(batch, window, place, result)
        return result


def _windows(batch: StepBatch, emitted: EmittedRows) -> list[Window]:
    """Of the rows that emit, in order."""
    ends = np.cumsum(batch.row_num_tokens)
    return [window_of(batch, row, int(ends[row])) for row in emitted.rows.tolist()]
