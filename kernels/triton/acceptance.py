"""Kernels of `kernels.rejection_sample.triton`, which says how they follow each other."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.philox import Purpose
from kernels.triton.noise import first_uniform
from kernels.triton.tiles import COUPLED, FLOAT_MAX, GREEDY, REJECTION, is_kept, join_picks, place_of_mass, weights_of

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_BONUS = tl.constexpr(int(Purpose.BONUS))
_NONE, _REST, _REST_OF_CERTAIN, _WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""What the next token of a request is drawn from: nothing more, the residual, that of a certain draft, the target."""
_BAD_DRAFT, _BAD_LOGITS, _BAD_DRAFT_PROBS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def draft_masses_kernel(
    request_of_row_ptr, row_starts_ptr, verify_lens_ptr, regimes_ptr,
    draft_probs_ptr, draft_slot_stride, draft_row_stride, draft_slots_ptr,
    masses_ptr, is_bad_ptr, draft_vocab_size, num_draft_tiles, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Float64 sum of tile `program_id(1)` of the distribution that the draft judged by row `program_id(0)` is from."""
    row, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    slot, k = tl.load(draft_slots_ptr + request), row - tl.load(row_starts_ptr + request)
    if (slot < 0) | (k >= tl.load(verify_lens_ptr + request)) | (tl.load(regimes_ptr + request) != REJECTION):
        return
    ids = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    row_ptr = draft_probs_ptr + slot.to(tl.int64) * draft_slot_stride + k.to(tl.int64) * draft_row_stride
    probs = tl.load(row_ptr + ids, ids < draft_vocab_size, other=0.0)
    is_good = (probs >= 0.0) & (probs <= FLOAT_MAX)
    place = row * num_draft_tiles + tile
    tl.store(masses_ptr + place, tl.sum(tl.where(is_good, probs, 0.0).to(tl.float64), 0))
    tl.store(is_bad_ptr + place, 1 - tl.min(is_good.to(tl.int32), 0))


@triton.jit
def _probability(
    logit, token_id, best_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, row, is_asked, temperature
):  # fmt: skip
    """Target probability, float64, of a token of a row, or of tokens of rows."""
    best = tl.load(best_ptr + row, is_asked, other=0.0)
    threshold = tl.load(thresholds_ptr + row, is_asked, other=0.0)
    last_id, floor = tl.load(last_ids_ptr + row, is_asked, other=0), tl.load(floors_ptr + row, is_asked, other=0.0)
    kept = is_kept(logit, token_id, threshold, last_id, floor, best, temperature)
    weight = tl.where(kept, weights_of(logit, best, temperature), 0.0)
    return weight.to(tl.float64) / tl.load(masses_ptr + row, is_asked, other=1.0)


@triton.jit
def accept_kernel(
    logits_ptr, logits_stride, row_starts_ptr, verify_lens_ptr, draft_ids_ptr, draft_ids_stride, positions_ptr,
    rounds_ptr, regimes_ptr, temperatures_ptr, keys_ptr,
    best_ptr, best_ids_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, is_valid_ptr, scores_ptr, picks_ptr,
    draft_probs_ptr, draft_slot_stride, draft_row_stride, draft_slots_ptr, draft_masses_ptr, is_bad_draft_ptr,
    target_to_draft_ptr,
    accepted_lens_ptr, token_ids_ptr, token_ids_stride, statuses_ptr, pending_ptr, draft_totals_ptr,
    asked_rows_ptr, asked_ids_ptr, asked_probs_ptr, num_asked,
    vocab_size, num_tiles, draft_vocab_size, num_draft_tiles,
    MAX_TILES: tl.constexpr, MAX_DRAFT_TILES: tl.constexpr, MAX_DRAFTS: tl.constexpr, MAX_ASKED: tl.constexpr,
    HAS_ASKS: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """The accept scan of request `program_id(0)`."""
    request = tl.program_id(0)
    num_drafts, regime = tl.load(verify_lens_ptr + request), tl.load(regimes_ptr + request)
    if (num_drafts < 0) | (regime == 0):
        return
    start, temperature = tl.load(row_starts_ptr + request), tl.load(temperatures_ptr + request)
    key, round_ = tl.load(keys_ptr + request), tl.load(rounds_ptr + request)
    slot = tl.load(draft_slots_ptr + request)
    own_drafts_ptr = draft_ids_ptr + request * draft_ids_stride
    accepted_len = tl.zeros([], tl.int32)
    status = tl.zeros([], tl.int32)
    own_id = tl.full([], -1, tl.int32)
    pending = tl.full([], _NONE, tl.int32)
    total = tl.full([], 1.0, tl.float64)
    is_running = num_drafts >= 0
    for k in range(num_drafts + 1):
        if is_running:
            row = start + k
            is_drafted = k < num_drafts
            draft_id = tl.load(own_drafts_ptr + k, is_drafted, other=0)
            is_token = (draft_id >= 0) & (draft_id < vocab_size)
            is_valid = tl.load(is_valid_ptr + row) != 0
            is_accepted = regime == 0
            if is_token & is_valid:
                if regime == GREEDY:
                    own_id = tl.load(best_ids_ptr + row)
                    is_accepted = is_drafted & (own_id == draft_id)
                elif regime == COUPLED:
                    own_id = join_picks(scores_ptr, picks_ptr, row, num_tiles, MAX_TILES)
                    is_accepted = is_drafted & (own_id == draft_id)
                elif is_drafted:
                    pending = tl.full([], _REST_OF_CERTAIN, tl.int32)
                    draft_prob = tl.full([], 1.0, tl.float64)
                    if slot >= 0:
                        tiles = tl.arange(0, MAX_DRAFT_TILES)
                        places = row * num_draft_tiles + tiles
                        masses = tl.load(draft_masses_ptr + places, tiles < num_draft_tiles, other=0.0)
                        total = tl.sum(masses, 0)
                        num_bad = tl.sum(tl.load(is_bad_draft_ptr + places, tiles < num_draft_tiles, other=0), 0)
                        if (num_bad > 0) | (total <= 0.0):
                            status = tl.full([], _BAD_DRAFT_PROBS, tl.int32)
                        column = draft_id
                        if HAS_MAP:
                            column = tl.load(target_to_draft_ptr + draft_id)
                        is_column = (column >= 0) & (column < draft_vocab_size)
                        place = slot.to(tl.int64) * draft_slot_stride + k * draft_row_stride + column
                        mass = tl.load(draft_probs_ptr + place, is_column & (status == 0), other=0.0).to(tl.float64)
                        if mass > 0.0:
                            pending = tl.full([], _REST, tl.int32)
                            draft_prob = mass / total
                    logit = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + draft_id).to(tl.float32)
                    prob = _probability(
                        logit, draft_id, best_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, row,
                        is_drafted, temperature,
                    )  # fmt: skip
                    chance = first_uniform(key, _ACCEPT, tl.load(positions_ptr + request) + 1 + k, round_)
                    is_accepted = (status == 0) & (chance * draft_prob < prob)
                else:
                    pending = tl.full([], _WHOLE, tl.int32)
            elif is_token:
                status = tl.full([], _BAD_LOGITS, tl.int32)
            else:
                status = tl.full([], _BAD_DRAFT, tl.int32)
            if is_accepted:
                accepted_len += 1
            is_running = is_accepted
    pending = tl.where(status == 0, pending, _NONE)
    tl.store(accepted_lens_ptr + request, accepted_len)
    tl.store(statuses_ptr + request, status)
    tl.store(pending_ptr + request, pending)
    tl.store(draft_totals_ptr + request, total)
    places = tl.arange(0, MAX_DRAFTS)
    out_ptr = token_ids_ptr + request * token_ids_stride
    is_accepted_place = places < accepted_len
    tl.store(out_ptr + places, tl.load(own_drafts_ptr + places, is_accepted_place, other=0), is_accepted_place)
    tl.store(out_ptr + accepted_len, own_id, (status == 0) & (regime != REJECTION))
    if HAS_ASKS:
        asks = tl.arange(0, MAX_ASKED)
        asked_place = request * num_asked + asks
        asked_row = tl.load(asked_rows_ptr + asked_place, asks < num_asked, other=-1)
        asked_id = tl.load(asked_ids_ptr + asked_place, asks < num_asked, other=0)
        last_row = tl.where((status == 0) & (regime == REJECTION), accepted_len, -1)
        is_asked = (asked_row >= 0) & (asked_row <= last_row)
        row = start + asked_row
        logit = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + asked_id, is_asked, other=0.0).to(tl.float32)
        probs = _probability(
            logit, asked_id, best_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, row, is_asked, temperature
        )
        tl.store(asked_probs_ptr + asked_place, tl.where(is_asked, probs, float("nan")), asks < num_asked)


@triton.jit
def _weights(
    request, pending, accepted_len, ids, logits_ptr, logits_stride, row_starts_ptr, draft_ids_ptr, draft_ids_stride,
    temperatures_ptr, best_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr,
    draft_probs_ptr, draft_slot_stride, draft_row_stride, draft_slots_ptr, target_to_draft_ptr, draft_totals_ptr,
    vocab_size, draft_vocab_size, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Float64 weights of `ids` that the next token is drawn from, and the target's own, which stand in for no mass."""
    row = tl.load(row_starts_ptr + request) + accepted_len
    is_id = ids < vocab_size
    logits = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, is_id, other=float("-inf")).to(tl.float32)
    probs = _probability(
        logits, ids, best_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr, row, row >= 0,
        tl.load(temperatures_ptr + request),
    )  # fmt: skip
    weights = probs
    if pending == _REST:
        columns = ids
        if HAS_MAP:
            columns = tl.load(target_to_draft_ptr + ids, is_id, other=-1)
        slot = tl.load(draft_slots_ptr + request)
        place = slot.to(tl.int64) * draft_slot_stride + accepted_len.to(tl.int64) * draft_row_stride
        is_column = is_id & (columns >= 0) & (columns < draft_vocab_size)
        masses = tl.load(draft_probs_ptr + place + columns, is_column, other=0.0).to(tl.float64)
        weights = tl.maximum(probs - masses / tl.load(draft_totals_ptr + request), 0.0)
    elif pending == _REST_OF_CERTAIN:
        certain_id = tl.load(draft_ids_ptr + request * draft_ids_stride + accepted_len)
        weights = tl.where(ids == certain_id, 0.0, probs)
    return weights, probs


@triton.jit
def pending_masses_kernel(
    logits_ptr, logits_stride, row_starts_ptr, verify_lens_ptr, draft_ids_ptr, draft_ids_stride, temperatures_ptr,
    best_ptr, best_ids_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr,
    draft_probs_ptr, draft_slot_stride, draft_row_stride, draft_slots_ptr, target_to_draft_ptr,
    accepted_lens_ptr, pending_ptr, draft_totals_ptr, tile_weights_ptr, tile_probs_ptr,
    vocab_size, num_tiles, draft_vocab_size, HAS_MAP: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Masses of tile `program_id(1)` of what request `program_id(0)` draws its next token from."""
    request, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(verify_lens_ptr + request) < 0:
        return
    pending = tl.load(pending_ptr + request)
    if pending == _NONE:
        return
    weights, probs = _weights(
        request, pending, tl.load(accepted_lens_ptr + request), tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB),
        logits_ptr, logits_stride, row_starts_ptr, draft_ids_ptr, draft_ids_stride,
        temperatures_ptr, best_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr,
        draft_probs_ptr, draft_slot_stride, draft_row_stride, draft_slots_ptr, target_to_draft_ptr, draft_totals_ptr,
        vocab_size, draft_vocab_size, HAS_MAP,
    )  # fmt: skip
    tl.store(tile_weights_ptr + request * num_tiles + tile, tl.sum(weights, 0))
    tl.store(tile_probs_ptr + request * num_tiles + tile, tl.sum(probs, 0))


@triton.jit
def draw_kernel(
    logits_ptr, logits_stride, row_starts_ptr, verify_lens_ptr, draft_ids_ptr, draft_ids_stride, temperatures_ptr,
    best_ptr, best_ids_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr,
    draft_probs_ptr, draft_slot_stride, draft_row_stride, draft_slots_ptr, target_to_draft_ptr,
    accepted_lens_ptr, pending_ptr, draft_totals_ptr, tile_weights_ptr, tile_probs_ptr,
    vocab_size, num_tiles, draft_vocab_size, positions_ptr, rounds_ptr, keys_ptr, token_ids_ptr, token_ids_stride,
    MAX_TILES: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK_VOCAB: tl.constexpr,
):  # fmt: skip
    """Inverse-CDF draw of the next token of request `program_id(0)`: its tile first, then the token in it."""
    request = tl.program_id(0)
    if tl.load(verify_lens_ptr + request) < 0:
        return
    pending, accepted_len = tl.load(pending_ptr + request), tl.load(accepted_lens_ptr + request)
    if pending == _NONE:
        return
    key, round_ = tl.load(keys_ptr + request), tl.load(rounds_ptr + request)
    position = tl.load(positions_ptr + request) + 1 + accepted_len
    chance = first_uniform(key, _RESIDUAL, position, round_)
    if pending == _WHOLE:
        chance = first_uniform(key, _BONUS, position, round_)
    tiles = tl.arange(0, MAX_TILES)
    tile_masses = tl.load(tile_weights_ptr + request * num_tiles + tiles, tiles < num_tiles, other=0.0)
    has_rest = tl.sum(tile_masses, 0) > 0.0
    if has_rest == 0:
        # Rejected with nothing left over: the two distributions are equal up to rounding.
        tile_masses = tl.load(tile_probs_ptr + request * num_tiles + tiles, tiles < num_tiles, other=0.0)
    wanted = chance * tl.sum(tile_masses, 0)
    tile, before = place_of_mass(tile_masses, tiles, wanted)
    ids = tile * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    weights, probs = _weights(
        request, pending, accepted_len, ids,
        logits_ptr, logits_stride, row_starts_ptr, draft_ids_ptr, draft_ids_stride,
        temperatures_ptr, best_ptr, masses_ptr, thresholds_ptr, last_ids_ptr, floors_ptr,
        draft_probs_ptr, draft_slot_stride, draft_row_stride, draft_slots_ptr, target_to_draft_ptr, draft_totals_ptr,
        vocab_size, draft_vocab_size, HAS_MAP,
    )  # fmt: skip
    token_id, _ = place_of_mass(tl.where(has_rest, weights, probs), ids, wanted - before)
    tl.store(token_ids_ptr + request * token_ids_stride + accepted_len, token_id)
