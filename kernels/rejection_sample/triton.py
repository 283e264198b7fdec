"""Many windows at once: every target row is looked at in tiles, then a program a request judges its drafts in order.

One sequence of launches serves greedy, coupled and rejection requests side by side, whatever their number:

1. summaries of all target rows, filters applied (`kernels.target_probs.triton`);
2. masses of the draft distributions of rejection windows; best coupled draws of coupled rows;
3. the accept scan: accepted length, and which distribution the next token of a rejection window comes from;
4. that distribution's mass in every tile (residual: max(target_probs - draft_probs, 0)), then an inverse-CDF draw:
   the tile, and the token in it. So the residual takes two passes and is stored nowhere.

Equality with the reference: the uniforms are the same bits. Greedy outcomes are the same. Coupled tokens are the same
unless two scores lie within 1e-5; a rejection row's decisions unless a uniform lies within the rounding of
`kernels.target_probs.triton` of an edge. Either way the outcome is exact for the target distribution as computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from kernels.rejection_sample import AskedToken, InvalidRowError, RowOutcome
from kernels.sampling import SlotSampling
from kernels.target_probs.triton import summarise
from kernels.triton.acceptance import accept_kernel, draft_masses_kernel, draw_kernel, pending_masses_kernel
from kernels.triton.rows import SamplingRows
from kernels.triton.tiles import BLOCK_VOCAB, num_tiles_of, tile_picks

_ERRORS = {
    1: "a draft is no token of the target's",
    2: "target logits hold NaN or +inf, or no finite value",
    3: "draft probabilities hold NaN, inf or negative values, or no mass",
}
"""By status of a request."""


class Windows(NamedTuple):
    """Front-packed target rows of R requests: [anchor, drafts] of each. M rows, some of them nobody's."""

    request_of_row: Tensor
    """[M] int32, -1 for rows of nobody."""
    row_starts: Tensor
    """[R] int32: the row of each anchor."""
    verify_lens: Tensor
    """[R] int32 drafts; -1 for a request that is nobody's."""
    draft_ids: Tensor
    """[R, G] int32 target ids, the first verify_lens of a row read."""
    positions: Tensor
    """[R] int64 of the anchors."""
    rounds: Tensor
    """[R] int64 of the Draft calls that made the drafts."""


class DraftDistributions(NamedTuple):
    """What rejection windows were drawn from."""

    probs: Tensor
    """[slots, at least G, Vd] float32."""
    slots: Tensor
    """[R] int32: each request's; -1 has none, and its drafts count as certain."""
    target_to_draft: Tensor | None = None
    """[V] int32: draft index of each target id, -1 outside the draft vocabulary; None for the identity."""


class Asks(NamedTuple):
    """Tokens of rejection windows whose target probability is wanted, A of each request."""

    rows: Tensor
    """[R, A] int32: target row that judges or follows the drafts, from 0; -1 asks nothing."""
    token_ids: Tensor
    """[R, A] int32"""
    probs: Tensor
    """[R, A] float64, written: NaN where no token was emitted, and in the other regimes."""


class WindowOutcomes(NamedTuple):
    """What is written for each request; nobody's are left alone."""

    accepted_lens: Tensor
    """[R] int32"""
    token_ids: Tensor
    """[R, G + 1] int32: the accepted drafts, then the recovered or bonus token; what follows is left alone."""
    statuses: Tensor
    """[R] int32: 0, or why the request's numbers cannot be sampled from; see `error_of`."""


def error_of(status: int) -> str:
    """A status other than 0 in words."""
    return _ERRORS[status]


def accept_rows(
    logits: Tensor,
    windows: Windows,
    rows: SamplingRows,
    drafts: DraftDistributions | None,
    outcomes: WindowOutcomes,
    asks: Asks | None = None,
    block_vocab: int = BLOCK_VOCAB,
) -> None:
    """Judges the drafts of R requests; `logits` [M, V] float32 or bfloat16. The outcome of a request depends on it
    alone. Rows after its first rejection may hold anything."""
    vocab_size, num_requests = logits.shape[1], len(windows.row_starts)
    num_tiles = num_tiles_of(vocab_size, block_vocab)
    max_tiles = triton.next_power_of_2(num_tiles)
    summaries = summarise(logits, windows.request_of_row, rows, block_vocab)
    filters = summaries.best, summaries.thresholds, summaries.last_ids, summaries.floors
    picks = tile_picks(
        logits, windows.request_of_row, windows.row_starts, rows, windows.positions, 1, None, filters, block_vocab
    )
    if drafts is None:
        nobody = torch.full_like(windows.row_starts, -1)
        drafts = DraftDistributions(logits.new_zeros(1, 1, 1, dtype=torch.float32), nobody)
    draft_vocab_size = drafts.probs.shape[2]
    num_draft_tiles = num_tiles_of(draft_vocab_size, block_vocab)
    draft_masses = logits.new_empty(len(logits), num_draft_tiles, dtype=torch.float64)
    is_bad_draft = logits.new_empty(len(logits), num_draft_tiles, dtype=torch.int32)
    draft_arguments = drafts.probs, drafts.probs.stride(0), drafts.probs.stride(1), drafts.slots
    draft_masses_kernel[len(logits), num_draft_tiles](
        windows.request_of_row, windows.row_starts, windows.verify_lens, rows.regimes, *draft_arguments,
        draft_masses, is_bad_draft, draft_vocab_size, num_draft_tiles, BLOCK_VOCAB=block_vocab, num_warps=8,
    )  # fmt: skip
    has_map = drafts.target_to_draft is not None
    target_to_draft = drafts.target_to_draft if has_map else windows.row_starts
    pending = logits.new_empty(num_requests, dtype=torch.int32)
    draft_totals = logits.new_empty(num_requests, dtype=torch.float64)
    num_asked = 0 if asks is None else asks.rows.shape[1]
    ask_arguments = (pending, pending, draft_totals) if asks is None else asks
    accept_kernel[(num_requests,)](
        logits, logits.stride(0), windows.row_starts, windows.verify_lens, windows.draft_ids,
        windows.draft_ids.stride(0), windows.positions, windows.rounds, rows.regimes, rows.temperatures, rows.keys,
        *summaries, *picks, *draft_arguments, draft_masses, is_bad_draft, target_to_draft,
        outcomes.accepted_lens, outcomes.token_ids, outcomes.token_ids.stride(0), outcomes.statuses,
        pending, draft_totals, *ask_arguments, num_asked, vocab_size, num_tiles, draft_vocab_size, num_draft_tiles,
        MAX_TILES=max_tiles, MAX_DRAFT_TILES=triton.next_power_of_2(num_draft_tiles),
        MAX_DRAFTS=triton.next_power_of_2(max(1, windows.draft_ids.shape[1])),
        MAX_ASKED=triton.next_power_of_2(max(1, num_asked)), HAS_ASKS=num_asked > 0, HAS_MAP=has_map, num_warps=1,
    )  # fmt: skip
    masses = logits.new_empty(2, num_requests, num_tiles, dtype=torch.float64)
    pending_arguments = (
        logits, logits.stride(0), windows.row_starts, windows.verify_lens, windows.draft_ids,
        windows.draft_ids.stride(0), rows.temperatures, *summaries[:6], *draft_arguments, target_to_draft,
        outcomes.accepted_lens, pending, draft_totals, masses[0], masses[1], vocab_size, num_tiles, draft_vocab_size,
    )  # fmt: skip
    pending_masses_kernel[num_requests, num_tiles](
        *pending_arguments, HAS_MAP=has_map, BLOCK_VOCAB=block_vocab, num_warps=8
    )
    draw_kernel[(num_requests,)](
        *pending_arguments, windows.positions, windows.rounds, rows.keys, outcomes.token_ids,
        outcomes.token_ids.stride(0), MAX_TILES=max_tiles, HAS_MAP=has_map, BLOCK_VOCAB=block_vocab, num_warps=8,
    )  # fmt: skip


def inverse_map(draft_to_target: npt.NDArray[np.uint32], vocab_size: int) -> Tensor:
    """`DraftDistributions.target_to_draft` [V] int32 of a reduced draft vocabulary, on the CPU."""
    inverse = np.full(vocab_size, -1, np.int32)
    inverse[draft_to_target] = np.arange(len(draft_to_target))
    return torch.from_numpy(inverse)


def accept_row(
    logits: npt.NDArray[np.float32],
    draft_ids: npt.NDArray[np.uint32],
    draft_probs: npt.NDArray[np.float32] | None,
    draft_to_target: npt.NDArray[np.uint32] | None,
    sampling: SlotSampling,
    position: int,
    round_: int,
    asked: Sequence[AskedToken] = (),
) -> RowOutcome:
    """Judges the l drafts of a row; arguments and errors of `kernels.rejection_sample.reference.accept_row`."""
    num_drafts, vocab_size = len(draft_ids), logits.shape[1]
    zero = torch.zeros(1, dtype=torch.int32)
    drafts_as_ints = np.minimum(draft_ids, np.uint32(2**31 - 1)).astype(np.int32)
    windows = Windows(
        torch.zeros(num_drafts + 1, dtype=torch.int32),
        zero,
        zero + num_drafts,
        torch.from_numpy(drafts_as_ints).view(1, -1),
        torch.tensor([position]),
        torch.tensor([round_]),
    )
    drafts = None
    if draft_probs is not None and num_drafts:
        inverse = None if draft_to_target is None else inverse_map(draft_to_target, vocab_size)
        drafts = DraftDistributions(torch.from_numpy(np.ascontiguousarray(draft_probs))[None], zero, inverse)
    asks = None
    if asked:
        rows, token_ids = (torch.tensor([values], dtype=torch.int32) for values in zip(*asked, strict=True))
        asks = Asks(rows, token_ids, torch.empty(1, len(asked), dtype=torch.float64))
    outcomes = WindowOutcomes(zero.clone(), torch.zeros(1, num_drafts + 1, dtype=torch.int32), zero.clone())
    accept_rows(torch.from_numpy(logits), windows, SamplingRows.of([sampling]), drafts, outcomes, asks)
    status, accepted_len = int(outcomes.statuses), int(outcomes.accepted_lens)
    if status:
        raise InvalidRowError(error_of(status))
    answers = () if asks is None else tuple(asks.probs[0].tolist())
    return RowOutcome(accepted_len, outcomes.token_ids[0, : accepted_len + 1].tolist(), answers)
