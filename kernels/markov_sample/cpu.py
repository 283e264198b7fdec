"""All slots of all rows in one compiled call: what does not depend on drafted tokens first, then the loop of `head`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kernels.cpu.native import floats
from kernels.markov_sample import BlockDraft, ConfidenceHead, MarkovHead, MarkovKind
from kernels.markov_sample.head import CHUNK, GATED, NO_HEAD, RNN, ROW_WORDS, RUN_HEAD, VANILLA
from kernels.sampling import SlotSampling

FloatArray = npt.NDArray[np.float32]
_KINDS = {MarkovKind.VANILLA: VANILLA, MarkovKind.GATED: GATED, MarkovKind.RNN: RNN}
_NONE = torch.empty(0)


def sample_block(
    base_logits: FloatArray,
    hidden: FloatArray,
    head: MarkovHead | None,
    confidence: ConfidenceHead | None,
    anchor_ids: npt.NDArray[np.uint32],
    sampling: Sequence[SlotSampling],
    positions: npt.NDArray[np.int64],
    rounds: npt.NDArray[np.int64],
    draft_to_target: npt.NDArray[np.uint32] | None,
    draft_probs_out: Sequence[FloatArray | None],
) -> BlockDraft:
    """Draws G drafts for each of B rows; arguments of `kernels.markov_sample.reference.sample_block`."""
    num_rows, num_slots, num_tokens = base_logits.shape
    hiddens, hidden_size = torch.from_numpy(hidden), hidden.shape[-1]
    rank = 0 if head is None else head.rank
    w1 = w2 = from_hidden = of_previous = seen_weight = _NONE
    if head is not None:
        w1, w2 = torch.from_numpy(head.w1), head.packed_w2
        if head.projection is not None and head.projection_bias is not None:
            of_hidden, of_previous = head.projection_parts
            from_hidden = functional.linear(hiddens, of_hidden, torch.from_numpy(head.projection_bias)).contiguous()
    confidence_logits = torch.full((num_rows, num_slots), torch.inf)
    if confidence is not None:
        weight = torch.from_numpy(confidence.weight[0])
        confidence_logits = (hiddens @ weight[:hidden_size] + confidence.bias).contiguous()
        seen_weight = weight[hidden_size:].contiguous()
    token_ids = np.empty((num_rows, num_slots + 1), np.uint32)
    token_ids[:, 0] = anchor_ids
    target_ids = np.arange(num_tokens, dtype=np.uint32) if draft_to_target is None else draft_to_target
    rows = np.empty((num_rows, ROW_WORDS), np.int64)
    rows[:, 0] = [row.regime for row in sampling]
    rows[:, 1] = np.array([row.key for row in sampling], np.uint64).view(np.int64)
    rows[:, 2], rows[:, 3] = positions + 1, rounds
    rows[:, 4] = [0 if out is None else floats(torch.from_numpy(out)) for out in draft_probs_out]
    temperatures = np.array([row.temperature for row in sampling])
    states, features = torch.zeros(num_rows, rank), torch.zeros(num_rows, rank)
    logits = np.empty((num_rows, num_tokens), np.float32)
    chunks = np.empty((2, num_rows, -(-num_tokens // CHUNK) + 1))
    control = np.empty(2, np.int64)
    RUN_HEAD(
        *(num_rows, num_slots, num_tokens, rank, NO_HEAD if head is None else _KINDS[head.kind]),
        w2.dtype == torch.float16,
        floats(torch.from_numpy(base_logits)),
        w2.data_ptr(),
        *(floats(part) for part in (w1, from_hidden, of_previous, seen_weight, confidence_logits)),
        *(array.ctypes.data for array in (token_ids, target_ids, rows, temperatures)),
        *(floats(part) for part in (states, features)),
        *(array.ctypes.data for array in (logits, chunks, control)),
    )
    return BlockDraft(token_ids[:, 1:], confidence_logits.numpy())
