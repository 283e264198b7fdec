"""Scores of emitted tokens, a program a row: the mass, then the likeliest tokens one after the other, each a pass.

Single-precision exponentials and double-precision sums, as on a CPU: logprobs within 1e-5 of the reference, ranks and
top ids equal. Few rows ask for scores, and they ask for few tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.token_scores import TokenScore
from kernels.triton.tiles import weights_of

_BLOCK_VOCAB = 2048


@triton.jit
def score_kernel(
    logits_ptr, logits_stride, request_of_row_ptr, row_starts_ptr, accepted_lens_ptr, token_ids_ptr, num_top_ptr,
    logprobs_ptr, ranks_ptr, top_ids_ptr, top_logprobs_ptr, max_tokens, max_top, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Score of the token of row `program_id(0)`."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    num_top, k = tl.load(num_top_ptr + request), row - tl.load(row_starts_ptr + request)
    if (num_top < 0) | (k > tl.load(accepted_lens_ptr + request)):
        return
    token = request * max_tokens + k
    token_id = tl.load(token_ids_ptr + token)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    chosen = tl.load(row_ptr + token_id).to(tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.max(logits, 0))
    mass = tl.zeros([], tl.float64)
    rank = tl.full([], 1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
        mass += tl.sum(weights_of(logits, best, 1.0).to(tl.float64), 0)
        rank += tl.sum((logits > chosen).to(tl.int32), 0)
    log_total = best.to(tl.float64) + tl.log(mass)
    tl.store(logprobs_ptr + token, chosen.to(tl.float64) - log_total)
    tl.store(ranks_ptr + token, rank)
    last = tl.full([], float("inf"), tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for place in range(num_top):
        best = tl.full([], float("-inf"), tl.float32)
        best_id = tl.full([], 2147483647, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + ids, ids < vocab_size, other=float("-inf")).to(tl.float32)
            is_left = (ids < vocab_size) & ((logits < last) | ((logits == last) & (ids > last_id)))
            logits = tl.where(is_left, logits, float("-inf"))
            tile_best = tl.max(logits, 0)
            tile_id = tl.min(tl.where(is_left & (logits == tile_best), ids, 2147483647), 0)
            is_better = (tile_best > best) | ((tile_best == best) & (tile_id < best_id))
            best, best_id = tl.where(is_better, tile_best, best), tl.where(is_better, tile_id, best_id)
        tl.store(top_ids_ptr + token * max_top + place, best_id)
        tl.store(top_logprobs_ptr + token * max_top + place, best.to(tl.float64) - log_total)
        last, last_id = best, best_id


class Scores(NamedTuple):
    """What is written of each scored token: W of each of R requests; the others are left alone."""

    logprobs: Tensor
    """[R, W] float64"""
    ranks: Tensor
    """[R, W] int32"""
    top_ids: Tensor
    """[R, W, T] int32, the first num_top of them."""
    top_logprobs: Tensor
    """[R, W, T] float64, likewise."""


def score_windows(
    logits: Tensor,
    request_of_row: Tensor,
    row_starts: Tensor,
    accepted_lens: Tensor,
    token_ids: Tensor,
    num_top: Tensor,
    scores: Scores,
) -> None:
    """Scores what requests emitted, token k by row k of their window in `logits` [M, V].

    request_of_row [M] and row_starts [R] int32 as in `kernels.ragged_rows`; accepted_lens [R] and token_ids [R, W]
    int32 as in `kernels.rejection_sample.triton.WindowOutcomes`; num_top [R] int32: likeliest tokens wanted, at most T
    and V; -1 scores nothing.
    """
    num_rows, vocab_size = logits.shape
    score_kernel[(num_rows,)](
        logits, logits.stride(0), request_of_row, row_starts, accepted_lens, token_ids, num_top, *scores,
        token_ids.shape[1], scores.top_ids.shape[2], vocab_size, BLOCK=_BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip


def token_score(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenScore:
    """Score of a token in one row [V], with the `num_top` likeliest tokens."""
    num_top = min(num_top, logits.size)
    zero, wanted = torch.zeros(1, dtype=torch.int32), torch.tensor([num_top], dtype=torch.int32)
    tops = (torch.empty(1, 1, max(1, num_top), dtype=kind) for kind in (torch.int32, torch.float64))
    scores = Scores(torch.empty(1, 1, dtype=torch.float64), torch.empty(1, 1, dtype=torch.int32), *tops)
    token_ids = torch.tensor([[token_id]], dtype=torch.int32)
    score_windows(torch.from_numpy(logits)[None], zero, zero, zero, token_ids, wanted, scores)
    return TokenScore(
        float(scores.logprobs),
        int(scores.ranks),
        tuple(scores.top_ids[0, 0, :num_top].tolist()),
        tuple(scores.top_logprobs[0, 0, :num_top].tolist()),
    )
