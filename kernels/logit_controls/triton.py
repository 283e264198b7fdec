"""Controls of many requests on the device: dense counts and bias by slot, all rows of all windows in two launches.

A row at draft k of a window counts the k drafts before it on top of the committed text's counts. Single-precision
operations one by one, none fused, so logits are those of the reference, bit for bit (0 and -0 apart).

A slot costs 8 bytes a token of the vocabulary: only requests that control anything should hold one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import LogitControls

_BLOCK_VOCAB = 2048
_IN_PROMPT = 1 << 30
"""Bit of a count: the prompt holds the token. The bits below count the answer's."""
_PROMPT_BIT = tl.constexpr(_IN_PROMPT)


class ControlSlots(NamedTuple):
    """Text counts and settings of C requests that control their logits."""

    counts: Tensor
    """[C, V] int32: times the answer holds each token, and the bit `_IN_PROMPT`."""
    bias: Tensor
    """[C, V] float32, -inf for tokens that are banned always."""
    penalties: Tensor
    """[C, 3] float32: repetition, frequency, presence."""
    sequences: Tensor
    """[C, B, L] int32: banned sequences of 2 tokens and more, last token first, -1 after the first token."""
    tails: Tensor
    """[C, L] int32: the end of the text, last token first, -1 before its start."""
    stop_ids: Tensor
    """[C, S] int32, -1 for none."""
    longest: Tensor
    """[C] int32: tokens of the longest banned sequence, 0 if none has 2 and more."""
    missing: Tensor
    """[C] int32: tokens that the answer lacks until stop ids are allowed; 0 and less allows them."""

    @classmethod
    def empty(
        cls, num_slots: int, vocab_size: int, limits: tuple[int, int, int], device: torch.device | str = "cpu"
    ) -> ControlSlots:
        """Room for `num_slots`; `limits`: banned sequences of a slot, their length, stop ids, each at least 1."""
        num_sequences, max_len, num_stops = limits

        def ints(*shape: int) -> Tensor:
            return torch.full((num_slots, *shape), -1, dtype=torch.int32, device=device)

        return cls(
            torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(num_slots, vocab_size, device=device),
            torch.zeros(num_slots, 3, device=device),
            ints(num_sequences, max_len),
            ints(max_len),
            ints(num_stops),
            ints(),
            ints(),
        )

    def take(self, slot: int, controls: LogitControls, text_ids: Sequence[int], num_prompt: int) -> None:
        """Gives a slot to a request. Raises ValueError if its sequences or stop ids have no room."""
        num_sequences, max_len = self.sequences.shape[1:]
        longer = [each for each in controls.banned_sequences if len(each) > 1]
        longest = max(map(len, longer), default=0)
        too_long = longest > max_len or len(longer) > num_sequences
        if too_long or len(controls.stop_token_ids) > self.stop_ids.shape[1]:
            raise ValueError(
                f"{len(longer)} banned sequences of up to {longest} tokens, {len(controls.stop_token_ids)} stop ids: "
                f"there is room for {num_sequences} sequences of {max_len} tokens and {self.stop_ids.shape[1]} stop ids"
            )
        vocab_size = self.counts.shape[1]
        counts = np.bincount(np.array(text_ids[num_prompt:], np.int64), minlength=vocab_size).astype(np.int32)
        counts[np.array(text_ids[:num_prompt], np.int64)] |= _IN_PROMPT
        bias = np.zeros(vocab_size, np.float32)
        for token_id, value in controls.bias:
            bias[token_id] = value
        for sequence in controls.banned_sequences:
            if len(sequence) == 1:
                bias[sequence[0]] = -np.inf
        penalties = controls.repetition_penalty, controls.frequency_penalty, controls.presence_penalty
        self.counts[slot].copy_(torch.from_numpy(counts))
        self.bias[slot].copy_(torch.from_numpy(bias))
        self.penalties[slot].copy_(torch.tensor(penalties))
        self.sequences[slot].copy_(_padded([each[::-1] for each in longer], num_sequences, max_len))
        self.tails[slot].copy_(_padded([tuple(text_ids)[: -max_len - 1 : -1]], 1, max_len)[0])
        self.stop_ids[slot].copy_(_padded([controls.stop_token_ids], 1, self.stop_ids.shape[1])[0])
        self.longest[slot] = longest
        self.missing[slot] = controls.min_tokens - (len(text_ids) - num_prompt)


def _padded(rows: Sequence[Sequence[int]], num_rows: int, width: int) -> Tensor:
    padded = torch.full((num_rows, width), -1, dtype=torch.int32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return padded


@triton.jit
def penalise_kernel(
    logits_ptr, logits_stride, request_of_row_ptr, row_starts_ptr, slots_ptr, draft_ids_ptr, draft_ids_stride,
    counts_ptr, bias_ptr, penalties_ptr, vocab_size, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Bias and penalties of tile `program_id(1)` of row `program_id(0)`."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    slot = tl.load(slots_ptr + request)
    if slot < 0:
        return
    ids = tl.program_id(1) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    is_id = ids < vocab_size
    place = slot.to(tl.int64) * vocab_size + ids
    counts = tl.load(counts_ptr + place, is_id, other=0)
    in_answer, in_prompt = counts & (_PROMPT_BIT - 1), counts & _PROMPT_BIT
    for k in range(row - tl.load(row_starts_ptr + request)):
        in_answer += (ids == tl.load(draft_ids_ptr + request * draft_ids_stride + k)).to(tl.int32)
    repetition, frequency = tl.load(penalties_ptr + 3 * slot), tl.load(penalties_ptr + 3 * slot + 1)
    presence = tl.load(penalties_ptr + 3 * slot + 2)
    own_ptr = logits_ptr + row.to(tl.int64) * logits_stride + ids
    logits = tl.load(own_ptr, is_id, other=0.0).to(tl.float32) + tl.load(bias_ptr + place, is_id, other=0.0)
    repeated = tl.where(logits > 0.0, tl.div_rn(logits, tl.zeros_like(logits) + repetition), logits * repetition)
    logits = tl.where((in_prompt | in_answer) != 0, repeated, logits)
    logits = tl.where(in_answer > 0, logits - (frequency * in_answer.to(tl.float32) + presence), logits)
    tl.store(own_ptr, logits, is_id)


@triton.jit
def ban_kernel(
    logits_ptr, logits_stride, request_of_row_ptr, row_starts_ptr, slots_ptr, draft_ids_ptr, draft_ids_stride,
    sequences_ptr, tails_ptr, stop_ids_ptr, longest_ptr, missing_ptr, num_sequences, max_len, num_stops,
    MAX_SEQUENCES: tl.constexpr, MAX_STOPS: tl.constexpr,
):  # fmt: skip
    """-inf for tokens that would complete a banned sequence in row `program_id(0)`, and for stops too early."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    slot = tl.load(slots_ptr + request)
    if slot < 0:
        return
    num_drafts = row - tl.load(row_starts_ptr + request)
    sequences = tl.arange(0, MAX_SEQUENCES)
    is_sequence = sequences < num_sequences
    sequence_ptr = sequences_ptr + (slot * num_sequences + sequences) * max_len
    last_ids = tl.load(sequence_ptr, is_sequence, other=-1)
    is_banned = last_ids >= 0
    for back in range(1, tl.load(longest_ptr + slot)):
        is_draft = num_drafts >= back
        draft_place = request * draft_ids_stride + num_drafts - back
        own_id = tl.load(draft_ids_ptr + draft_place, is_draft, other=-1)
        if is_draft == 0:
            own_id = tl.load(tails_ptr + slot * max_len + back - num_drafts - 1)
        wanted_ids = tl.load(sequence_ptr + back, is_sequence, other=-1)
        is_banned &= (wanted_ids < 0) | (wanted_ids == own_id)
    own_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    nothing = float("-inf")
    tl.store(own_ptr + last_ids, tl.full([MAX_SEQUENCES], nothing, logits_ptr.dtype.element_ty), is_banned)
    stops = tl.arange(0, MAX_STOPS)
    num_banned = tl.where(num_drafts < tl.load(missing_ptr + slot), num_stops, 0)
    stop_ids = tl.load(stop_ids_ptr + slot * num_stops + stops, stops < num_banned, other=-1)
    tl.store(own_ptr + stop_ids, tl.full([MAX_STOPS], nothing, logits_ptr.dtype.element_ty), stop_ids >= 0)


@triton.jit
def commit_kernel(
    slots_ptr, token_ids_ptr, token_ids_stride, num_tokens_ptr, counts_ptr, tails_ptr, missing_ptr, vocab_size, max_len,
    MAX_TOKENS: tl.constexpr, MAX_LEN: tl.constexpr,
):  # fmt: skip
    """Appends the committed tokens of request `program_id(0)` to its slot's text."""
    request = tl.program_id(0)
    slot, num_tokens = tl.load(slots_ptr + request), tl.load(num_tokens_ptr + request)
    if (slot < 0) | (num_tokens <= 0):
        return
    own_ptr = token_ids_ptr + request * token_ids_stride
    places = tl.arange(0, MAX_TOKENS)
    is_token = places < num_tokens
    token_ids = tl.load(own_ptr + places, is_token, other=0)
    ones = tl.full([MAX_TOKENS], 1, tl.int32)
    tl.atomic_add(counts_ptr + slot.to(tl.int64) * vocab_size + token_ids, ones, is_token)
    backs = tl.arange(0, MAX_LEN)
    tail_ptr = tails_ptr + slot * max_len + backs
    is_old = backs >= num_tokens
    old_ids = tl.load(tail_ptr - num_tokens, is_old & (backs < max_len), other=-1)
    new_ids = tl.load(own_ptr + num_tokens - 1 - backs, is_old == 0, other=-1)
    tl.debug_barrier()
    tl.store(tail_ptr, tl.where(is_old, old_ids, new_ids), backs < max_len)
    tl.store(missing_ptr + slot, tl.load(missing_ptr + slot) - num_tokens)


def control_rows(
    logits: Tensor, request_of_row: Tensor, row_starts: Tensor, slots: Tensor, draft_ids: Tensor, controls: ControlSlots
) -> None:
    """Changes `logits` [M, V], float32, in place. request_of_row [M] and row_starts [R] int32 as in
    `kernels.ragged_rows`; slots [R] int32, -1 for requests that control nothing; draft_ids [R, G] int32."""
    num_rows, vocab_size = logits.shape
    num_sequences, max_len = controls.sequences.shape[1:]
    num_stops = controls.stop_ids.shape[1]
    common = logits, logits.stride(0), request_of_row, row_starts, slots, draft_ids, draft_ids.stride(0)
    penalise_kernel[num_rows, triton.cdiv(vocab_size, _BLOCK_VOCAB)](
        *common, controls.counts, controls.bias, controls.penalties, vocab_size,
        BLOCK_VOCAB=_BLOCK_VOCAB, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    ban_kernel[(num_rows,)](
        *common, controls.sequences, controls.tails, controls.stop_ids, controls.longest, controls.missing,
        num_sequences, max_len, num_stops,
        MAX_SEQUENCES=triton.next_power_of_2(num_sequences), MAX_STOPS=triton.next_power_of_2(num_stops), num_warps=1,
    )  # fmt: skip


def commit_tokens(slots: Tensor, token_ids: Tensor, num_tokens: Tensor, controls: ControlSlots) -> None:
    """Appends the first num_tokens [R] (int32) of token_ids [R, G + 1] (int32) to the texts of slots [R]."""
    max_len = controls.tails.shape[1]
    commit_kernel[(len(slots),)](
        slots, token_ids, token_ids.stride(0), num_tokens, controls.counts, controls.tails, controls.missing,
        controls.counts.shape[1], max_len,
        MAX_TOKENS=triton.next_power_of_2(token_ids.shape[1]), MAX_LEN=triton.next_power_of_2(max_len), num_warps=1,
    )  # fmt: skip


def controlled_logits(
    row: npt.NDArray[np.float32], controls: LogitControls, text_ids: Sequence[int], num_prompt: int
) -> npt.NDArray[np.float32]:
    """Logits [V] of the token after `text_ids`, which starts with the prompt's `num_prompt` tokens; `row` stays."""
    max_len = max((len(each) for each in controls.banned_sequences), default=1)
    room = max(1, len(controls.banned_sequences)), max_len, max(1, len(controls.stop_token_ids))
    slots = ControlSlots.empty(1, row.size, room)
    slots.take(0, controls, text_ids, num_prompt)
    logits, zero = torch.from_numpy(row.copy())[None], torch.zeros(1, dtype=torch.int32)
    control_rows(logits, zero, zero, zero, zero.view(1, 1), slots)
    return logits[0].numpy()
