"""Verify lengths on a GPU: between the drafter's blocks and a captured step there is no look of the host at either.

A graph of its own, started right before the step's: lengths by `kernels/verify_lens`, then the inputs of the step as
the host would have filled them, had it known the lengths (`steps.token_rows`, `steps.emitted_rows`). The host reads
lengths and drafts with the step's results. It knows how many drafts will be verified at most, and takes the geometry by
that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from service_kit.gpu import Gpu
from service_kit.graphs import Geometry, StepGraphs
from service_kit.staging import Field, Staging
from verifier_service.block_windows import with_drafts
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import StepBatch

_WHOLE = Geometry(1, 1)
"""There is one graph, for every row that a step may have."""


class DeviceBlocks:
    """Settles steps on the device. Used on the engine thread only."""

    def __init__(
        self, sizes: SessionSizes, step_inputs: Mapping[str, Tensor], verify_lens: Callable[..., None], gpu: Gpu
    ) -> None:
        """`step_inputs`: those of the captured step, by name (`DeviceInputs.device`). Nothing is captured yet."""
        self._sizes, self._step_inputs, self._verify_lens = sizes, step_inputs, verify_lens
        rows, tokens, drafts = sizes.num_slots, sizes.max_batch_tokens, max(1, sizes.max_draft_tokens)
        whole = np.int64
        self._inputs = Staging(
            {
                # Of each row of the step, with its anchor alone where it has a block.
                "counts": Field((rows,), whole),
                "starts": Field((rows,), whole),
                "slots": Field((rows,), whole),
                "emits": Field((rows,), whole),
                "is_judged": Field((rows,), whole),
                "token_ids": Field((tokens,), whole),
                # Of each block.
                "block_rows": Field((rows,), whole),
                "block_slots": Field((rows,), whole),
                "max_drafts": Field((rows,)),
                "weights": Field((rows,), np.float64),
                "budget": Field((1,), whole),
            },
            gpu.device,
        )
        self._outputs = Staging(
            {"lens": Field((rows,)), "token_ids": Field((rows, drafts), whole)},
            gpu.device,
        )
        self._graphs = StepGraphs("verify lengths", gpu.runner, [_WHOLE])

    def capture(self, blocks: Tensor) -> None:
        """`blocks`: rows of the blocks arena, [2 * num_slots + 1, >= max_draft_tokens] float64."""
        self._graphs.capture(lambda _: lambda: self._run(blocks))

    def start(self, batch: StepBatch, failed: Mapping[int, str]) -> None:
        """Starts settling a step, whose inputs have been uploaded: all of it but lengths and what follows from them.
        `failed` rows are judged by nobody, and run without drafts."""
        assert batch.blocks is not None
        host, blocks = self._inputs.host, batch.blocks
        for values in host.values():
            values.fill(0)
        num_rows, num_blocks = len(batch.row_slots), len(blocks.rows)
        arrays = {"counts": batch.row_num_tokens, "starts": batch.row_starts, "slots": batch.row_slots}
        for name, values in {**arrays, "emits": batch.row_emits}.items():
            host[name][:num_rows] = values
        host["is_judged"][:num_rows] = [row not in failed for row in range(num_rows)]
        host["token_ids"][: len(batch.token_ids)] = batch.token_ids
        host["block_rows"].fill(self._sizes.num_slots)  # nobody's
        host["max_drafts"].fill(-1)
        host["block_rows"][:num_blocks], host["block_slots"][:num_blocks] = blocks.rows, batch.row_slots[blocks.rows]
        host["max_drafts"][:num_blocks] = np.where(host["is_judged"][blocks.rows], blocks.max_drafts, 0)
        host["weights"][:num_blocks], host["budget"][0] = blocks.weights, blocks.budget
        self._inputs.upload()
        self._graphs.replay(_WHOLE)
        self._outputs.download()

    def settled(self, batch: StepBatch) -> StepBatch:
        """The step as it was run; its results must be here."""
        assert batch.blocks is not None
        host, num_blocks = self._outputs.host, len(batch.blocks.rows)
        lens = host["lens"][:num_blocks].astype(np.int64)
        return with_drafts(batch, batch.blocks.rows, lens, host["token_ids"][:num_blocks])

    def _run(self, blocks: Tensor) -> None:
        given, out = self._inputs.device, self._outputs.device
        rows, drafts = self._sizes.num_slots, out["token_ids"].shape[1]
        of_slot = blocks[:-1].view(rows, 2, -1)[given["block_slots"], :, :drafts]  # [rows, 2, drafts]
        out["token_ids"].copy_(of_slot[:, 0])
        out["lens"].zero_()
        self._verify_lens(
            (of_slot[:, 1] * given["weights"][:, None]).contiguous(), given["max_drafts"], given["budget"], out["lens"]
        )
        index = torch.arange(rows, device=blocks.device)
        row_lens = torch.zeros(rows + 1, dtype=torch.int64, device=blocks.device)
        row_blocks = torch.zeros(rows + 1, dtype=torch.int64, device=blocks.device)
        row_lens.index_copy_(0, given["block_rows"], out["lens"].to(torch.int64))
        row_blocks.index_copy_(0, given["block_rows"], index)
        lens, draft_ids = row_lens[:-1], out["token_ids"][row_blocks[:-1]]  # of each row
        ends = torch.cumsum(given["counts"] + lens, 0)
        self._fill_tokens(lens, draft_ids, ends)
        self._fill_windows(lens, draft_ids, ends)

    def _fill_tokens(self, lens: Tensor, draft_ids: Tensor, ends: Tensor) -> None:
        """The token rows of the forward: of each row its own tokens, then the drafts it verifies."""
        given, into, counts = self._inputs.device, self._step_inputs, self._inputs.device["counts"]
        place = torch.arange(len(given["token_ids"]), device=ends.device)
        is_real = place < ends[-1]
        row = torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1)
        offset = place - (ends - counts - lens)[row]
        own = ((torch.cumsum(counts, 0) - counts)[row] + offset).clamp(max=len(place) - 1)
        draft = (offset - counts[row]).clamp(0, draft_ids.shape[1] - 1)
        token_ids = torch.where(offset < counts[row], given["token_ids"][own], draft_ids[row, draft])
        positions, slots = given["starts"][row] + offset, given["slots"][row]
        into["token_ids"].copy_(torch.where(is_real, token_ids, 0))
        into["positions"].copy_(torch.where(is_real, positions, 0))
        into["slots"].copy_(torch.where(is_real, slots, -1))
        if ring_rows := self._sizes.feature_ring_rows:
            spare = self._sizes.num_slots * ring_rows
            into["ring_rows"].copy_(torch.where(is_real, slots * ring_rows + positions % ring_rows, spare))

    def _fill_windows(self, lens: Tensor, draft_ids: Tensor, ends: Tensor) -> None:
        """The rows of logits, and the windows of the rows that emit: request p is the p-th of them."""
        given, into = self._inputs.device, self._step_inputs
        emits = given["emits"]
        num_logits = emits * (1 + lens)
        logit_ends, request_of = torch.cumsum(num_logits, 0), torch.cumsum(emits, 0)
        place = torch.arange(len(into["logit_rows"]), device=ends.device)
        row = torch.searchsorted(logit_ends, place, right=True).clamp(max=len(ends) - 1)
        is_real = place < logit_ends[-1]
        # The last of a row's tokens: those of its window.
        into["logit_rows"].copy_(torch.where(is_real, ends[row] - logit_ends[row] + place, 0))
        is_judged = is_real & (given["is_judged"][row] > 0)
        into["request_of_row"].copy_(torch.where(is_judged, request_of[row] - 1, -1))
        request = torch.arange(len(ends), device=ends.device)
        row = torch.searchsorted(request_of, request, right=True).clamp(max=len(ends) - 1)
        is_judged = (request < request_of[-1]) & (given["is_judged"][row] > 0)
        into["row_starts"].copy_(torch.where(is_judged, (logit_ends - num_logits)[row], 0))
        into["verify_lens"].copy_(torch.where(is_judged, lens[row], -1))
        is_draft = is_judged[:, None] & (torch.arange(draft_ids.shape[1], device=ends.device) < lens[row][:, None])
        into["draft_ids"].copy_(torch.where(is_draft, draft_ids[row], 0))
