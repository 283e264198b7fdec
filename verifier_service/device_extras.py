"""What some rows of a step on a device ask for beyond sampling: masks, logit controls, scores, probabilities.

They work on a float32 copy of the logits, in the order in which `verifier_service.acceptance` does it on a CPU, so that
scores are of the target's own. The copy takes a pass over the logits of all rows; apart from it, a row that asks for
nothing costs each kernel an early return.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.logit_controls.triton import commit_tokens, control_rows
from kernels.rejection_sample import InvalidRowError
from kernels.rejection_sample.triton import Asks, WindowOutcomes, Windows
from kernels.token_masks.triton import lift_controls, mask_windows
from kernels.token_scores import TokenScore
from kernels.token_scores.triton import Scores, score_windows
from service_kit.staging import Field, Staging
from verifier_service.device_texts import DeviceTexts
from verifier_service.session import Session
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import Acceptance, StepBatch, Window

_MAX_TOP = 20
"""Likeliest tokens of a score, as many as the scheduler lets through. A captured step needs a bound; a row beyond it
fails alone."""


class DeviceExtras:
    """Inputs, outputs and kernels of all that. Used on the engine thread only."""

    def __init__(self, sizes: SessionSizes, vocab_size: int, device: torch.device) -> None:
        """Nothing is asked for yet."""
        rows, window, logits = sizes.num_slots, sizes.max_draft_tokens + 1, sizes.max_logit_rows
        self._max_asks = window * window
        """Of a row: every draft of as many blocks as can be open at a position, and one more."""
        self._texts = DeviceTexts(sizes, vocab_size, device)
        self._inputs = Staging(
            {
                "mask_starts": Field((rows,)),
                "control_slots": Field((rows,)),
                "num_added": Field((rows,)),
                "added_ids": Field((rows, window)),
                "num_top": Field((rows,)),
                "asked_rows": Field((rows, self._max_asks)),
                "asked_ids": Field((rows, self._max_asks)),
            },
            device,
        )
        self._outputs = Staging(
            {
                "asked_probs": Field((rows, self._max_asks), np.float64),
                "logprobs": Field((rows, window), np.float64),
                "ranks": Field((rows, window)),
                "top_ids": Field((rows, window, _MAX_TOP)),
                "top_logprobs": Field((rows, window, _MAX_TOP), np.float64),
            },
            device,
        )
        self._masks = Staging({"masks": Field((logits, -(-vocab_size // 32)))}, device)
        self._num_masks = 0
        self._logits = torch.empty(logits, vocab_size, device=device)
        self.is_used = True
        """Whether a row of this step asks for something."""
        self.blank()

    def blank(self) -> None:
        """Begins a step in which nobody asks for anything."""
        if not self.is_used:
            return
        host = self._inputs.host
        for name in ("mask_starts", "control_slots", "num_top", "asked_rows"):
            host[name].fill(-1)
        host["num_added"].fill(0)
        self._num_masks, self.is_used = 0, False

    def fill(self, session: Session, batch: StepBatch, window: Window, place: int) -> None:
        """Takes what the row of `window`, request `place` of the device's, asks for.

        Raises InvalidRowError or StaleArenaError, with nothing taken, if the row cannot have it.
        """
        options, host = session.slots.target[window.slot], self._inputs.host
        num_top = -1 if options is None or options.num_logprobs is None else options.num_logprobs
        if num_top > _MAX_TOP:
            raise InvalidRowError(f"{num_top} likeliest tokens are more than the {_MAX_TOP} there is room for")
        asks = batch.prob_asks[batch.prob_asks[:, 0] == window.row]
        if len(asks) > self._max_asks:
            raise InvalidRowError(f"{len(asks)} probabilities are more than the {self._max_asks} there is room for")
        masks = None
        if len(batch.row_masked) and batch.row_masked[window.row]:
            masks = session.masks.of_window(window.slot, batch.step_id, window.anchor + 1, len(window.token_ids))
        if options is not None and not options.controls.is_neutral:
            added = self._texts.begin(window.slot, options, window.anchor, int(window.token_ids[0]))
            host["control_slots"][place], host["num_added"][place] = window.slot, len(added)
            host["added_ids"][place, : len(added)] = added
            self.is_used = True
        if masks is not None:
            own = slice(self._num_masks, self._num_masks + len(masks))
            self._masks.host["masks"][own] = masks.view(np.int32)
            host["mask_starts"][place], self._num_masks = own.start, own.stop
        host["num_top"][place] = min(num_top, session.vocab_size)
        host["asked_rows"][place, : len(asks)] = asks[:, 1] - window.anchor - 1
        host["asked_ids"][place, : len(asks)] = asks[:, 2]
        self.is_used |= masks is not None or num_top >= 0 or len(asks) > 0

    def upload(self) -> None:
        """Starts the copies to the device."""
        self._inputs.upload()
        self._masks.upload_first("masks", self._num_masks)

    def download(self) -> None:
        """Starts the copy from the device."""
        self._outputs.download()

    def change(self, logits: Tensor, windows: Windows) -> Tensor:
        """On the device: what is sampled from, [M, V] float32, in place of `logits` [M, V], which stay."""
        given = {name: values[: len(windows.row_starts)] for name, values in self._inputs.device.items()}
        changed, controls = self._logits[: len(logits)], self._texts.controls
        changed.copy_(logits)
        place, slots = (windows.request_of_row, windows.row_starts), given["control_slots"]
        masks = self._masks.device["masks"], given["mask_starts"]
        mask_windows(changed, *place, *masks)
        commit_tokens(slots, given["added_ids"], given["num_added"], controls)
        control_rows(changed, *place, slots, windows.draft_ids, controls)
        lift_controls(changed, logits, *place, *masks, slots)
        return changed

    def asks(self, num_requests: int) -> Asks:
        """On the device: probabilities asked for by the first requests."""
        given, found = self._inputs.device, self._outputs.device["asked_probs"]
        return Asks(given["asked_rows"][:num_requests], given["asked_ids"][:num_requests], found[:num_requests])

    def score(self, logits: Tensor, windows: Windows, outcomes: WindowOutcomes) -> None:
        """On the device: scores of what was emitted, by the target's own `logits` [M, V]."""
        count = len(windows.row_starts)
        scores = Scores(*(self._outputs.device[name][:count] for name in Scores._fields))
        num_top = self._inputs.device["num_top"][:count]
        place = windows.request_of_row, windows.row_starts
        score_windows(logits, *place, outcomes.accepted_lens, outcomes.token_ids, num_top, scores)

    def read(self, batch: StepBatch, window: Window, place: int, result: Acceptance) -> None:
        """Adds to `result` what the row asked for and got, its tokens being the last ones there."""
        host, found = self._inputs.host, self._outputs.host
        count = result.accepted_lens[window.row] + 1
        if host["control_slots"][place] >= 0:
            self._texts.extend(window.slot, result.token_ids[-count:])
        if (num_top := int(host["num_top"][place])) >= 0:
            result.scores[window.row] = [
                TokenScore(
                    float(found["logprobs"][place, k]),
                    int(found["ranks"][place, k]),
                    tuple(found["top_ids"][place, k, :num_top].tolist()),
                    tuple(found["top_logprobs"][place, k, :num_top].tolist()),
                )
                for k in range(count)
            ]
        asked = np.flatnonzero(batch.prob_asks[:, 0] == window.row)
        result.target_probs[asked] = found["asked_probs"][place, : len(asked)]
