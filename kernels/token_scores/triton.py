"""A program a row: the mass, then the likeliest tokens one after the other, each a pass over the row.

Single-precision exponentials and double-precision sums, as on a CPU: logprobs within 1e-5 of the reference, ranks and
top ids equal. Few rows ask for scores, and they ask for few tokens.
"""

from __future__ import annotations

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
    logits_ptr, logits_stride, token_ids_ptr, num_top_ptr, logprobs_ptr, ranks_ptr, top_ids_ptr, top_logprobs_ptr,
    max_top, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Score of row `program_id(0)`."""
    row = tl.program_id(0)
    token_id = tl.load(token_ids_ptr + row)
    if token_id < 0:
        return
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
    tl.store(logprobs_ptr + row, chosen.to(tl.float64) - log_total)
    tl.store(ranks_ptr + row, rank)
    last = tl.full([], float("inf"), tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for place in range(tl.load(num_top_ptr + row)):
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
        tl.store(top_ids_ptr + row * max_top + place, best_id)
        tl.store(top_logprobs_ptr + row * max_top + place, best.to(tl.float64) - log_total)
        last, last_id = best, best_id


def score_rows(
    logits: Tensor,
    token_ids: Tensor,
    num_top: Tensor,
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None:
    """Scores of tokens of `logits` [M, V], written to logprobs [M] float64, ranks [M] int32, top_ids [M, T] int32 and
    top_logprobs [M, T] float64, the first num_top [M] (int32, at most T and V) of the latter two. token_ids [M] int32;
    -1 scores nothing."""
    num_rows, vocab_size = logits.shape
    score_kernel[(num_rows,)](
        logits, logits.stride(0), token_ids, num_top, logprobs, ranks, top_ids, top_logprobs,
        top_ids.shape[1], vocab_size, BLOCK=_BLOCK_VOCAB, num_warps=8,
    )  # fmt: skip


def token_score(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenScore:
    """Score of a token in one row [V], with the `num_top` likeliest tokens."""
    num_top = min(num_top, logits.size)
    asked, wanted = (torch.tensor([value], dtype=torch.int32) for value in (token_id, num_top))
    logprob, rank = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.int32)
    top_ids, top_logprobs = (torch.empty(1, max(1, num_top), dtype=kind) for kind in (torch.int32, torch.float64))
    score_rows(torch.from_numpy(logits)[None], asked, wanted, logprob, rank, top_ids, top_logprobs)
    return TokenScore(
        float(logprob),
        int(rank),
        tuple(top_ids[0, :num_top].tolist()),
        tuple(top_logprobs[0, :num_top].tolist()),
    )
