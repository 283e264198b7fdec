"""What the host tells a captured step: its token rows, and the windows that it judges."""

from __future__ import annotations

import numpy as np
import torch

from kernels.rejection_sample.triton import Windows
from kernels.sampling import Regime, SlotSampling
from kernels.triton.rows import NOBODY, SamplingRows, as_signed
from service_kit.graphs import Geometry
from service_kit.staging import Field, Staging
from verifier_service.model import TokenRows
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import EmittedRows, StepBatch, Window


class DeviceInputs:
    """One block of inputs, filled step after step. Used on the engine thread only."""

    def __init__(self, sizes: SessionSizes, device: torch.device) -> None:
        """Every row is nobody's."""
        self._sizes = sizes
        tokens, rows, logits = sizes.max_batch_tokens, sizes.num_slots, sizes.max_logit_rows
        self._staging = Staging(
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
            device,
        )
        self.device = self._staging.device
        """By name, as kernels read them."""
        self.blank()

    def blank(self) -> None:
        """Begins a step in which every row is nobody's."""
        host = self._staging.host
        for values in host.values():
            values.fill(0)
        host["slots"].fill(-1)
        host["ring_rows"].fill(self._sizes.num_slots * self._sizes.feature_ring_rows)  # the spare row
        for name in ("request_of_row", "verify_lens", "probs_slots"):
            host[name].fill(-1)
        host["regimes"].fill(NOBODY)
        host["temperatures"].fill(1)

    def fill_tokens(self, batch: StepBatch, rows: TokenRows, emitted: EmittedRows) -> None:
        """Takes the token rows of the forward, and which of them need logits."""
        host, num_tokens, num_logits = self._staging.host, len(batch.token_ids), len(emitted.token_rows)
        slots, positions = rows.slots.numpy().astype(np.int64), rows.positions.numpy()
        host["token_ids"][:num_tokens], host["positions"][:num_tokens] = batch.token_ids, positions
        host["slots"][:num_tokens] = slots
        if ring_rows := self._sizes.feature_ring_rows:
            host["ring_rows"][:num_tokens] = slots * ring_rows + positions % ring_rows
        host["logit_rows"][:num_logits] = emitted.token_rows

    def fill_window(
        self, window: Window, sampling: SlotSampling, place: int, offset: int, *, has_draft_probs: bool
    ) -> None:
        """Makes a window request `place` of the device; its first logits are row `offset` of the step's."""
        host, num_drafts = self._staging.host, len(window.draft_ids)
        host["request_of_row"][offset : offset + num_drafts + 1] = place
        host["row_starts"][place], host["verify_lens"][place] = offset, num_drafts
        host["draft_ids"][place, :num_drafts] = window.draft_ids
        host["anchors"][place], host["rounds"][place] = window.anchor, window.round
        host["probs_slots"][place] = window.slot if has_draft_probs else -1
        host["regimes"][place], host["keys"][place] = sampling.regime, as_signed(sampling.key)
        if sampling.regime != Regime.GREEDY:
            host["temperatures"][place] = sampling.temperature
        for name in ("top_k", "top_p", "min_p"):
            host[name][place] = getattr(sampling, name)

    def upload(self) -> None:
        """Starts the copy to the device."""
        self._staging.upload()

    def tokens(self, geometry: Geometry) -> TokenRows:
        """On the device: the token rows of a step of this shape."""
        return TokenRows(*(self.device[name][: geometry.tokens] for name in TokenRows._fields))

    def windows(self, geometry: Geometry) -> Windows:
        """On the device: the windows of a step of this shape."""
        num_logits = min(geometry.tokens, geometry.rows * (self._sizes.max_draft_tokens + 1))
        names = "row_starts", "verify_lens", "draft_ids", "anchors", "rounds"
        given = (self.device[name][: geometry.rows] for name in names)
        return Windows(self.device["request_of_row"][:num_logits], *given)

    def sampling(self, geometry: Geometry) -> SamplingRows:
        """On the device: how tokens of those windows are chosen."""
        return SamplingRows(*(self.device[name][: geometry.rows] for name in SamplingRows._fields))
