"""The compiled loop of `kernels.markov_sample.cpu`: slots one after the other, each in chunks of the draft vocabulary.

A slot is up to three passes that threads share: logits and the largest of every chunk; the mass, or the best coupled
draw, of every chunk of a sampled row; the probabilities of rejection rows. The entry joins chunks in order, so that
nothing depends on the threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.cpu.jit import compiled, types
from kernels.cpu.memory import float32_at, float64_at, int64_at, uint32_at
from kernels.cpu.native import Kernel, arguments_of, int_arguments, next_item, run_items
from kernels.cpu.noise import best_coupled, coupled_exponential, draws_of, first_uniform
from kernels.cpu.packed import load_as
from kernels.cpu.simd import LANES, fma_each, load_part, splat, stack_floats, store_part
from kernels.cpu.softmax import inverse_cdf, largest, mass, weigh
from kernels.philox import Purpose
from kernels.sampling import Regime

COLUMNS = 4 * LANES
"""Draft tokens of a block of packed W2 [Vd / COLUMNS, r, COLUMNS]."""
CHUNK = 8 * COLUMNS
"""Draft tokens of a work item."""
NO_HEAD, VANILLA, GATED, RNN = range(4)
ROW_WORDS = 5
"""int64 words of a row: regime, key, position of slot 0's token, round, address of its draft distributions."""
_LOGITS, _DRAWS, _PROBABILITIES = range(3)  # passes of a slot
_GREEDY, _COUPLED, _REJECTION = int(Regime.GREEDY), int(Regime.COUPLED), int(Regime.REJECTION)
_DRAFT = np.uint64(Purpose.DRAFT)
_STACK = 2 * CHUNK  # float32 that hold a chunk of float64
_NUM_SIZES, _NUM_ARGUMENTS = 6, 22


@compiled
def _sizes(arguments: int) -> Any:
    """num_rows, num_slots, num_tokens, rank, kind of head, whether W2 is float16."""
    return int_arguments(arguments, _NUM_SIZES)


@compiled
def _addresses(arguments: int) -> Any:
    """In the order of `kernels.markov_sample.cpu`."""
    return int_arguments(arguments, _NUM_ARGUMENTS)[_NUM_SIZES:]


@compiled
def _block_logits(
    zeros: Any, like: Any, row: int, block: int, base: int, base_stride: int, w2: int, features: int, logits: int,
    num_tokens: int, rank: int,
) -> None:  # fmt: skip
    """base + W2 · feature of one block of tokens, for as many rows as `zeros` has."""
    sums0, sums1, sums2, sums3 = zeros, zeros, zeros, zeros
    for i in range(rank):
        feature, at = row * rank + i, (block * rank + i) * COLUMNS
        sums0 = fma_each(sums0, features, feature, rank, load_as(like, w2, at))
        sums1 = fma_each(sums1, features, feature, rank, load_as(like, w2, at + LANES))
        sums2 = fma_each(sums2, features, feature, rank, load_as(like, w2, at + 2 * LANES))
        sums3 = fma_each(sums3, features, feature, rank, load_as(like, w2, at + 3 * LANES))
    for query in range(len(zeros)):
        place, base_place = (row + query) * num_tokens, (row + query) * base_stride
        for part, sums in enumerate((sums0, sums1, sums2, sums3)):
            token = block * COLUMNS + part * LANES
            count = num_tokens - token
            if count > 0:
                total = sums[query] + load_part(base, base_place + token, count)
                store_part(logits, place + token, count, total)


@compiled
def _chunk_logits(
    like: Any, num_rows: int, chunk: int, base: int, base_stride: int, w2: int, features: int, logits: int,
    num_tokens: int, rank: int,
) -> None:  # fmt: skip
    zero = splat(0.0)
    for block in range(chunk * CHUNK // COLUMNS, (min(num_tokens, (chunk + 1) * CHUNK) + COLUMNS - 1) // COLUMNS):
        for row in range(0, num_rows - 1, 2):
            _block_logits((zero, zero), like, row, block, base, base_stride, w2, features, logits, num_tokens, rank)
        if num_rows % 2:
            row = num_rows - 1
            _block_logits((zero,), like, row, block, base, base_stride, w2, features, logits, num_tokens, rank)


@compiled
def _run(work: int) -> None:
    arguments = arguments_of(work)
    num_rows, num_slots, num_tokens, rank, _, is_half = _sizes(arguments)
    base, w2, _, _, _, _, _, _, targets, rows, temperatures_at, _, features, logits_at, chunks, control_at = _addresses(
        arguments
    )
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    control, temperatures = int64_at(control_at, 2), float64_at(temperatures_at, num_rows)
    target_ids = uint32_at(targets, num_tokens)
    values = float64_at(chunks, num_rows * (num_chunks + 1))  # the last of a row is the row's own
    indices = int64_at(chunks + 8 * values.size, values.size)
    weights, draws = float64_at(stack_floats(_STACK), CHUNK), float64_at(stack_floats(_STACK), CHUNK)
    pass_, slot = control[0], control[1]
    chunk = next_item(work)
    while chunk < num_chunks:
        start = chunk * CHUNK
        count = min(num_tokens - start, CHUNK)
        if pass_ == _LOGITS:
            slot_base, stride = base + 4 * slot * num_tokens, num_slots * num_tokens
            if is_half:
                _chunk_logits(
                    types.int16(0), num_rows, chunk, slot_base, stride, w2, features, logits_at, num_tokens, rank
                )
            else:
                _chunk_logits(
                    types.float32(0), num_rows, chunk, slot_base, stride, w2, features, logits_at, num_tokens, rank
                )
        for row in range(num_rows):
            regime, key, position, _, probs = _row_words(rows, row)
            own = row * (num_chunks + 1) + num_chunks
            place = own - num_chunks + chunk
            logits = float32_at(logits_at + 4 * (row * num_tokens + start), count)
            if pass_ == _LOGITS:
                index, values[place] = largest(logits, 0, count)
                indices[place] = start + index
            elif indices[own] >= 0 and regime != _GREEDY and (pass_ == _DRAWS or regime == _REJECTION):
                weigh(logits, 0, count, values[own], temperatures[row], weights)
                if pass_ == _PROBABILITIES:
                    probs_out = float32_at(probs + 4 * (slot * num_tokens + start), count)
                    share = 1.0 / values[place]
                    for index in range(count):
                        probs_out[index] = weights[index] * share
                elif regime == _REJECTION:
                    values[place] = mass(weights, 0, count)
                else:
                    seed, token_position = np.uint64(key), np.uint64(position + slot)
                    # No draw is worse than that of the likeliest token, whose weight is 1.
                    bound = coupled_exponential(np.int64(target_ids[indices[own]]), seed, token_position)
                    draws_of(target_ids[start : start + count], count, seed, token_position, draws)
                    index, values[place] = best_coupled(weights, draws, count, bound)
                    indices[place] = start + index if index >= 0 else -1
        chunk = next_item(work)


@compiled
def _row_words(rows: int, row: int) -> Any:
    words = int64_at(rows + 8 * ROW_WORDS * row, ROW_WORDS)
    return words[0], words[1], words[2], words[3], words[4]


@compiled
def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@compiled
def _add_product(matrix: Any, start: int, x: Any, sums: Any) -> None:
    """sums += x · rows start … of a matrix whose rows are as long as `sums`."""
    for i in range(x.size):
        for j in range(sums.size):
            sums[j] += matrix[(start + i) * sums.size + j] * x[i]


@compiled
def _step_feature(kind: int, embedding: Any, joint: Any, of_previous: Any, state: Any, feature: Any) -> None:
    """What W2 multiplies for one slot, and the state after it. `joint` starts with the hidden state's part."""
    rank = embedding.size
    if kind == RNN:
        _add_product(of_previous, 0, state, joint)
        _add_product(of_previous, rank, embedding, joint)
        for i in range(rank):
            kept = _sigmoid(joint[i])
            state[i] = kept * state[i] + (1.0 - kept) * math.tanh(joint[rank + i])
            feature[i] = math.tanh(joint[2 * rank + i])
    elif kind == GATED:
        _add_product(of_previous, 0, embedding, joint)
        for i in range(rank):
            feature[i] = embedding[i] * _sigmoid(joint[i])
    elif kind == VANILLA:
        feature[:] = embedding


def _entry(arguments: int) -> None:
    num_rows, num_slots, num_tokens, rank, kind, _ = _sizes(arguments)
    (
        _, _, w1, from_hidden, of_previous_at, seen_weight, confidence_at, tokens_at, targets, rows, _, states,
        features, _, chunks, control_at,
    ) = _addresses(arguments)  # fmt: skip
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    control = int64_at(control_at, 2)
    target_ids = uint32_at(targets, num_tokens)
    values = float64_at(chunks, num_rows * (num_chunks + 1))
    indices = int64_at(chunks + 8 * values.size, values.size)
    confidence, tokens = (
        float32_at(confidence_at, num_rows * num_slots),
        uint32_at(tokens_at, num_rows * (num_slots + 1)),
    )
    num_joint = 3 * rank if kind == RNN else rank
    of_previous = float32_at(of_previous_at, 2 * rank * num_joint)
    is_sampled, is_rejection = False, False
    for row in range(num_rows):
        regime, _, _, _, _ = _row_words(rows, row)
        is_sampled = is_sampled or regime != _GREEDY
        is_rejection = is_rejection or regime == _REJECTION

    for slot in range(num_slots):
        for row in range(num_rows):
            if kind != NO_HEAD:
                previous = np.int64(tokens[row * (num_slots + 1) + slot])
                embedding = float32_at(w1 + 4 * rank * previous, rank)
                _step_feature(
                    kind,
                    embedding,
                    float32_at(from_hidden + 4 * (row * num_slots + slot) * num_joint, num_joint),
                    of_previous,
                    float32_at(states + 4 * row * rank, rank),
                    float32_at(features + 4 * row * rank, rank),
                )
                if seen_weight != 0:
                    weight, total = float32_at(seen_weight, rank), 0.0
                    for i in range(rank):
                        total += weight[i] * embedding[i]
                    confidence[row * num_slots + slot] += total
        control[0], control[1] = _LOGITS, slot
        run_items(arguments, num_chunks > 1)
        for row in range(num_rows):
            own = row * (num_chunks + 1) + num_chunks
            values[own], indices[own] = -math.inf, -1
            for place in range(own - num_chunks, own):
                if not (values[place] <= values[own]):
                    values[own], indices[own] = values[place], indices[place]
                    if values[place] != values[place]:
                        break
            if not (values[own] < math.inf):
                indices[own] = -1
        if is_sampled:
            control[0] = _DRAWS
            run_items(arguments, num_chunks > 1)
        for row in range(num_rows):
            regime, _, _, _, _ = _row_words(rows, row)
            own = row * (num_chunks + 1) + num_chunks
            if regime == _COUPLED and indices[own] >= 0:
                best = math.inf
                for place in range(own - num_chunks, own):
                    if indices[place] >= 0 and values[place] < best:
                        best, indices[own] = values[place], indices[place]
            elif regime == _REJECTION and indices[own] >= 0:
                total = 0.0
                for place in range(own - num_chunks, own):
                    total += values[place]
                values[own - num_chunks : own] = total
        if is_rejection:
            control[0] = _PROBABILITIES
            run_items(arguments, num_chunks > 1)
        for row in range(num_rows):
            regime, key, position, round_, probs = _row_words(rows, row)
            index = indices[row * (num_chunks + 1) + num_chunks]
            if regime == _REJECTION:
                probs_out = float32_at(probs + 4 * slot * num_tokens, num_tokens)
                if index < 0:
                    probs_out[:] = 0.0
                    probs_out[0] = 1.0
                else:
                    chance = first_uniform(np.uint64(key), _DRAFT, np.uint64(position + slot), np.uint64(round_))
                    index = inverse_cdf(probs_out, chance)
            if index < 0:
                index = 0
                confidence[row * num_slots + slot] = math.nan
            tokens[row * (num_slots + 1) + slot + 1] = target_ids[index]


def _body(work: int) -> None:
    _run(work)


RUN_HEAD = Kernel("q" * _NUM_ARGUMENTS, _entry, _body)
