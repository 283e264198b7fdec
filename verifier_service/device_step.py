"""A session's steps on a GPU: forward, features, logits and acceptance of a whole step captured once per geometry.

The host fills one block of inputs, starts a graph and reads one block of outputs; nothing in between waits for it. Rows
that ask for more than a captured step does (masks, logit controls, scores, probabilities) take part in its forward;
their logits are then fetched, and they are accepted on the host by the kernels that do so for every row there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.rejection_sample import RowOutcome
from kernels.rejection_sample.triton import (
    DraftDistributions,
    WindowOutcomes,
    Windows,
    accept_rows,
    error_of,
    inverse_map,
)
from kernels.sampling import Regime
from kernels.triton.rows import NOBODY, SamplingRows, as_signed
from service_kit.errors import StaleArenaError
from service_kit.gpu import Gpu
from service_kit.graphs import Geometry, StepGraphs, geometries
from service_kit.staging import Field, Staging
from verifier_service.host_rows import RowOutcomes, accept_on_host
from verifier_service.model import TargetModel, TokenRows, Workspace
from verifier_service.prompt_scores import score_prompts
from verifier_service.session import Session
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import Acceptance, EmittedRows, StepBatch

_SAMPLING_FIELDS = tuple(SamplingRows._fields)


class DeviceStep:
    """Inputs, outputs and graphs of a session's steps. Used on the engine thread only."""

    def __init__(self, model: TargetModel, sizes: SessionSizes, space: Workspace, gpu: Gpu) -> None:
        """Nothing is captured yet."""
        self._model, self._sizes, self._space, self._runner = model, sizes, space, gpu.runner
        self._graphs = StepGraphs("step", gpu.runner, geometries(sizes.max_batch_tokens, sizes.num_slots))
        tokens, rows, logits = sizes.max_batch_tokens, sizes.num_slots, sizes.max_logit_rows
        self._window = sizes.max_draft_tokens + 1
        self._inputs = Staging(
            {
                "token_ids": Field((tokens,), np.int64),
                "positions": Field((tokens,)),
                "slots": Field((tokens,)),
                "ring_rows": Field((tokens,), np.int64),
                "logit_rows": Field((logits,), np.int64),
                "request_of_row": Field((logits,)),
                "row_starts": Field((rows,)),
                "verify_lens": Field((rows,)),
                "draft_ids": Field((rows, max(1, sizes.max_draft_tokens))),
                "anchors": Field((rows,), np.int64),
                "rounds": Field((rows,), np.int64),
                "probs_slots": Field((rows,)),
                "regimes": Field((rows,)),
                "temperatures": Field((rows,), np.float32),
                "top_k": Field((rows,)),
                "top_p": Field((rows,), np.float64),
                "min_p": Field((rows,), np.float32),
                "keys": Field((rows,), np.int64),
            },
            gpu.device,
        )
        self._outputs = Staging(
            {
                "accepted_lens": Field((rows,)),
                "token_ids": Field((rows, self._window)),
                "statuses": Field((rows,)),
            },
            gpu.device,
        )
        like = space.residual
        self._gathered = like.new_empty(logits, model.config.hidden_size)
        self._logits = like.new_empty(logits, model.config.vocab_size)
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
        self._blank()
        self._inputs.upload()
        self._graphs.capture(partial(self._work, session))
        self._arena_names = session.arena_names

    def _work(self, session: Session, geometry: Geometry) -> partial[None]:
        """What a step of this shape does on the device."""
        given, out = self._inputs.device, self._outputs.device
        tokens, rows = geometry
        logits = self._num_logits(geometry)
        windows = Windows(
            given["request_of_row"][:logits],
            *(given[name][:rows] for name in ("row_starts", "verify_lens", "draft_ids", "anchors", "rounds")),
        )
        drafts = None
        if (probs := session.drafts.device_probs) is not None:
            mapping = session.drafts.draft_to_target
            inverse = None if mapping is None else inverse_map(mapping, session.vocab_size).to(probs.device)
            drafts = DraftDistributions(probs, given["probs_slots"][:rows], inverse)
        return partial(
            self._run,
            TokenRows(given["token_ids"][:tokens], given["positions"][:tokens], given["slots"][:tokens]),
            session.ring.device_rows if session.ring else None,
            windows,
            SamplingRows(*(given[name][:rows] for name in _SAMPLING_FIELDS)),
            drafts,
            WindowOutcomes(*(out[name][:rows] for name in ("accepted_lens", "token_ids", "statuses"))),
        )

    def _run(
        self,
        rows: TokenRows,
        ring: Tensor | None,
        windows: Windows,
        sampling: SamplingRows,
        drafts: DraftDistributions | None,
        outcomes: WindowOutcomes,
    ) -> None:
        assert self._page_table is not None
        num_tokens, num_logits = len(rows.token_ids), len(windows.request_of_row)
        hidden = self._model.forward(rows, self._page_table, self._space)
        if ring is not None:
            ring.index_copy_(0, self._inputs.device["ring_rows"][:num_tokens], self._space.features[:num_tokens])
        gathered, logits = self._gathered[:num_logits], self._logits[:num_logits]
        torch.index_select(hidden, 0, self._inputs.device["logit_rows"][:num_logits], out=gathered)
        self._model.weights.lm_head(gathered, logits)
        accept_rows(logits, windows, sampling, drafts, outcomes)

    def _num_logits(self, geometry: Geometry) -> int:
        return min(geometry.tokens, geometry.rows * self._window, len(self._logits))

    def _blank(self) -> None:
        """Inputs of a step in which every row is nobody's."""
        host = self._inputs.host
        for values in host.values():
            values.fill(0)
        host["slots"].fill(-1)
        host["ring_rows"].fill(self._sizes.num_slots * self._sizes.feature_ring_rows)  # the spare row
        for name in ("request_of_row", "verify_lens", "probs_slots"):
            host[name].fill(-1)
        host["regimes"].fill(NOBODY)
        host["temperatures"].fill(1)

    def run(
        self,
        session: Session,
        batch: StepBatch,
        rows: TokenRows,
        emitted: EmittedRows,
        accept_row: Callable[..., RowOutcome],
        failed: Mapping[int, str],
    ) -> Acceptance:
        """Runs a step; arguments as `accept`. Raises InvalidRequestError for one that no graph holds."""
        geometry = self._graphs.fit(len(batch.token_ids), max(1, len(emitted.rows)))
        outcomes = RowOutcomes(reasons=dict(failed))
        self._blank()
        self._fill_tokens(batch, rows, emitted)
        on_host = [
            place
            for place, row in enumerate(emitted.rows.tolist())
            if row not in failed and not self._fill_window(session, batch, emitted, place, outcomes)
        ]
        self._update_pages(session)
        self._inputs.upload()
        self._graphs.replay(geometry)
        self._outputs.download()
        self._runner.synchronize()
        if session.ring:
            session.ring.write(batch.step_id, rows, self._space.features)
        self.replayed_ns = time.perf_counter_ns()
        self._read(batch, emitted, set(on_host), outcomes)
        extras = accept_on_host(session, batch, emitted, self._logits, on_host, accept_row, outcomes)
        result = outcomes.assemble(batch, emitted, extras)
        hidden = self._space.normed[: len(batch.token_ids)]
        result.prompt_scores = score_prompts(
            session, batch, hidden, lambda some: self._model.logits(some).float().cpu()
        )
        return result

    def _fill_tokens(self, batch: StepBatch, rows: TokenRows, emitted: EmittedRows) -> None:
        host, num_tokens, num_logits = self._inputs.host, len(batch.token_ids), len(emitted.token_rows)
        slots, positions = rows.slots.numpy().astype(np.int64), rows.positions.numpy()
        host["token_ids"][:num_tokens], host["positions"][:num_tokens] = batch.token_ids, positions
        host["slots"][:num_tokens] = slots
        if ring_rows := self._sizes.feature_ring_rows:
            host["ring_rows"][:num_tokens] = slots * ring_rows + positions % ring_rows
        host["logit_rows"][:num_logits] = emitted.token_rows

    def _fill_window(
        self, session: Session, batch: StepBatch, emitted: EmittedRows, place: int, outcomes: RowOutcomes
    ) -> bool:
        """Gives row `place` of `emitted` to the device; False if the host must accept it."""
        row, offset = int(emitted.rows[place]), int(emitted.offsets[place])
        slot, num_drafts = int(batch.row_slots[row]), int(batch.row_num_drafts[row])
        options = session.slots.target[slot]
        is_masked = len(batch.row_masked) > 0 and bool(batch.row_masked[row])
        is_asked = bool((batch.prob_asks[:, 0] == row).any())
        has_scores = options is not None and options.num_logprobs is not None
        if is_masked or is_asked or has_scores or session.text(slot) is not None:
            return False
        sampling, host = session.sampling(slot), self._inputs.host
        end = int(batch.row_num_tokens[: row + 1].sum())
        anchor = int(batch.row_starts[row] + batch.row_num_tokens[row]) - num_drafts - 1
        round_ = int(batch.row_rounds[row])
        if num_drafts and sampling.regime == Regime.REJECTION:
            try:
                session.drafts.require(slot, round_, anchor + 1)
            except StaleArenaError as error:
                outcomes.reasons[row] = str(error)
                return True
            host["probs_slots"][place] = slot
        host["request_of_row"][offset : offset + num_drafts + 1] = place
        host["row_starts"][place], host["verify_lens"][place] = offset, num_drafts
        host["draft_ids"][place, :num_drafts] = batch.token_ids[end - num_drafts : end]
        host["anchors"][place], host["rounds"][place] = anchor, round_
        host["regimes"][place], host["keys"][place] = sampling.regime, as_signed(sampling.key)
        if sampling.regime != Regime.GREEDY:
            host["temperatures"][place] = sampling.temperature
        host["top_k"][place], host["top_p"][place], host["min_p"][place] = (
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
        )
        return True

    def _update_pages(self, session: Session) -> None:
        assert self._page_table is not None, "not captured"
        if changed := session.take_changed_slots():
            self._page_table[changed] = session.page_table[changed].to(self._page_table.device)

    def _read(self, batch: StepBatch, emitted: EmittedRows, on_host: Set[int], outcomes: RowOutcomes) -> None:
        """Outcomes of the rows that the device accepted."""
        host = self._outputs.host
        for place, row in enumerate(emitted.rows.tolist()):
            if place in on_host or row in outcomes.reasons:
                continue
            if status := int(host["statuses"][place]):
                outcomes.reasons[row] = error_of(status)
                continue
            accepted_len = int(host["accepted_lens"][place])
            outcomes.judged[row] = RowOutcome(accepted_len, host["token_ids"][place, : accepted_len + 1].tolist())
