"""Kernels of `kernels.markov_sample.triton`: what a slot's bias and confidence are made of, and its draw."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.philox import Purpose
from kernels.triton.noise import first_uniform
from kernels.triton.tiles import COUPLED, REJECTION, join_picks, join_stats, place_of_mass, weights_of

VANILLA, GATED, RNN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK_ROWS = 16
"""Rows of a product's tile. Always as many, so that a row's sums do not depend on how many rows there are."""
_DRAFT = tl.constexpr(int(Purpose.DRAFT))


@triton.jit
def linear_kernel(
    x_ptr, x_stride, x_rows_ptr, w_ptr, w_stride, base_ptr, base_stride, out_ptr, out_stride,
    num_rows, num_inputs, num_outputs,
    HAS_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """out[n] = base[n] + w · x[row n], float32 sums in an order that the inputs' number alone decides.

    Tiles of all rows follow each other for one tile of outputs, so that w is read from memory once.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    sources = rows
    if HAS_ROWS:
        sources = tl.load(x_rows_ptr + rows, is_row, other=0)
    x_row_ptr = x_ptr + sources.to(tl.int64)[:, None] * x_stride
    w_row_ptr = w_ptr + outputs.to(tl.int64)[None, :] * w_stride
    sums = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, num_inputs, BLOCK_IN):
        inputs = start + tl.arange(0, BLOCK_IN)
        is_input = inputs < num_inputs
        x = tl.load(x_row_ptr + inputs[None, :], is_row[:, None] & is_input[None, :], other=0.0)
        w = tl.load(w_row_ptr + inputs[:, None], is_output[None, :] & is_input[:, None], other=0.0)
        sums = tl.dot(x.to(w.dtype), w, sums, input_precision="ieee")
    is_out = is_row[:, None] & is_output[None, :]
    base = tl.load(base_ptr + rows.to(tl.int64)[:, None] * base_stride + outputs[None, :], is_out, other=0.0)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :], base.to(tl.float32) + sums, is_out)


def linear(x: Tensor, w: Tensor, base: Tensor, out: Tensor, x_rows: Tensor | None = None) -> None:
    """out [n, outputs] float32 = base + w [outputs, inputs] · x [n, inputs], x cast to w's dtype.

    base [n, outputs], or [outputs] for all rows, of any float dtype; it may be `out`. x_rows [n] int32 chooses rows
    of x, None takes them in order.
    """
    num_rows, (num_outputs, num_inputs) = len(out), w.shape
    block_out = 128 if num_outputs >= 1024 else 32
    linear_kernel[triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(num_outputs, block_out)](
        x, x.stride(0), w if x_rows is None else x_rows, w, w.stride(0), base, 0 if base.dim() == 1 else base.stride(0),
        out, out.stride(0), num_rows, num_inputs, num_outputs,
        HAS_ROWS=x_rows is not None, BLOCK_ROWS=BLOCK_ROWS, BLOCK_IN=64, BLOCK_OUT=block_out, num_warps=4,
    )  # fmt: skip


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit(do_not_specialize=["slot"])
def feature_kernel(
    regimes_ptr, previous_ptr, w1_ptr, w1_stride, joint_ptr, joint_stride, state_ptr, feature_ptr,
    seen_weight_ptr, confidence_ptr, confidence_stride, slot, rank,
    KIND: tl.constexpr, SEES_PREVIOUS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """What W2 multiplies for slot `slot` of row `program_id(0)`, the state after it, and the confidence's last term."""
    row = tl.program_id(0)
    if tl.load(regimes_ptr + row) == 0:
        return
    places = tl.arange(0, RANK)
    is_place = places < rank
    embedding_ptr = w1_ptr + tl.load(previous_ptr + row).to(tl.int64) * w1_stride
    embedding = tl.load(embedding_ptr + places, is_place, other=0.0).to(tl.float32)
    joint_row_ptr = joint_ptr + row * joint_stride + places
    feature = embedding
    if KIND == GATED:
        feature = embedding * _sigmoid(tl.load(joint_row_ptr, is_place, other=0.0))
    if KIND == RNN:
        kept = _sigmoid(tl.load(joint_row_ptr, is_place, other=0.0))
        state = tl.load(state_ptr + row * rank + places, is_place, other=0.0)
        state = kept * state + (1.0 - kept) * _tanh(tl.load(joint_row_ptr + rank, is_place, other=0.0))
        tl.store(state_ptr + row * rank + places, state, is_place)
        feature = _tanh(tl.load(joint_row_ptr + 2 * rank, is_place, other=0.0))
    tl.store(feature_ptr + row * rank + places, feature, is_place)
    if SEES_PREVIOUS:
        seen = tl.sum(embedding * tl.load(seen_weight_ptr + places, is_place, other=0.0).to(tl.float32), 0)
        place = confidence_ptr + row * confidence_stride + slot
        tl.store(place, tl.load(place) + seen)


@triton.jit
def draft_probs_kernel(
    logits_ptr, logits_stride, regimes_ptr, temperatures_ptr,
    tile_best_ptr, tile_ids_ptr, tile_masses_ptr, tile_bad_ptr,
    probs_ptr, probs_slot_stride, probs_slots_ptr, masses_ptr, num_tokens, num_tiles,
    MAX_TILES: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Draft probabilities of tile `program_id(1)` of a rejection row as they stay, and their float64 sum."""
    row, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(regimes_ptr + row) != REJECTION:
        return
    temperature = tl.load(temperatures_ptr + row)
    best, _, mass, is_valid = join_stats(
        tile_best_ptr, tile_ids_ptr, tile_masses_ptr, tile_bad_ptr, row, num_tiles, temperature, MAX_TILES
    )
    ids = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    is_id = ids < num_tokens
    probs = tl.where(ids == 0, 1.0, 0.0)
    if is_valid:
        logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, is_id, other=float("-inf"))
        probs = (weights_of(logits.to(tl.float32), best, temperature).to(tl.float64) / mass).to(tl.float32)
    place = tl.load(probs_slots_ptr + row).to(tl.int64) * probs_slot_stride
    tl.store(probs_ptr + place + ids, probs, is_id)
    tl.store(masses_ptr + row * num_tiles + tile, tl.sum(tl.where(is_id, probs, 0.0).to(tl.float64), 0))


@triton.jit(do_not_specialize=["slot"])
def draft_token_kernel(
    regimes_ptr, temperatures_ptr, keys_ptr, positions_ptr, rounds_ptr,
    tile_best_ptr, tile_ids_ptr, tile_masses_ptr, tile_bad_ptr, scores_ptr, picks_ptr,
    probs_ptr, probs_slot_stride, probs_slots_ptr, masses_ptr, target_ids_ptr,
    previous_ptr, token_ids_ptr, token_ids_stride, confidence_ptr, confidence_stride, slot, num_tokens, num_tiles,
    HAS_TARGET_IDS: tl.constexpr, MAX_TILES: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """The draft of slot `slot` of row `program_id(0)`."""
    row = tl.program_id(0)
    regime = tl.load(regimes_ptr + row)
    if regime == 0:
        return
    _, index, _, is_valid = join_stats(
        tile_best_ptr, tile_ids_ptr, tile_masses_ptr, tile_bad_ptr, row, num_tiles, tl.load(temperatures_ptr + row),
        MAX_TILES,
    )  # fmt: skip
    if regime == COUPLED:
        index = join_picks(scores_ptr, picks_ptr, row, num_tiles, MAX_TILES)
    if regime == REJECTION:
        chance = first_uniform(
            tl.load(keys_ptr + row), _DRAFT, tl.load(positions_ptr + row) + 1 + slot, tl.load(rounds_ptr + row)
        )
        tiles = tl.arange(0, MAX_TILES)
        masses = tl.load(masses_ptr + row * num_tiles + tiles, tiles < num_tiles, other=0.0)
        wanted = chance * tl.sum(masses, 0)
        tile, before = place_of_mass(masses, tiles, wanted)
        ids = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        place = tl.load(probs_slots_ptr + row).to(tl.int64) * probs_slot_stride
        probs = tl.load(probs_ptr + place + ids, ids < num_tokens, other=0.0)
        index, _ = place_of_mass(probs.to(tl.float64), ids, wanted - before)
    confidence_place = confidence_ptr + row * confidence_stride + slot
    tl.store(confidence_place, float("nan"), is_valid == 0)
    index = tl.where(is_valid, index, 0)
    token_id = index
    if HAS_TARGET_IDS:
        token_id = tl.load(target_ids_ptr + index)
    tl.store(previous_ptr + row, token_id)
    tl.store(token_ids_ptr + row * token_ids_stride + slot, token_id)
