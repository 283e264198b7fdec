"""The whole acceptance path is lossless: drafting, trimmed windows and acceptance against exact enumeration.

A first-order target over 5 tokens and a drafter that knows 3 of them (through draft_to_target) run as the executors
do, round after round. Windows are trimmed: some positions are drafted in one round, not verified, and drafted again.
Statistic: Pearson's chi-square of the first three emitted tokens, cells of expectation under 5 pooled, against the
enumerated target, at significance 1e-4. Rules known to be wrong must be rejected by the same statistic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kernels.draws import inverse_cdf_index
from kernels.markov_sample import ConfidenceHead, MarkovHead, MarkovKind
from kernels.markov_sample.cpu import sample_block
from kernels.philox import Purpose, coupled_exponentials, uniforms
from kernels.rejection_sample import RowOutcome
from kernels.rejection_sample.cpu import accept_row
from kernels.sampling import Regime, SlotSampling
from kernels.target_probs import reference

VOCAB_SIZE, BLOCK_SIZE, NUM_TOKENS = 5, 4, 3
ANCHOR_ID, ANCHOR_POSITION = 1, 11
NUM_REQUESTS = 3000
NORMAL_QUANTILE = 3.719  # of 1 - 1e-4

_rng = np.random.default_rng(20)
TARGET_LOGITS = _rng.normal(0.0, 1.0, (VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)  # [previous, next]
DRAFT_TO_TARGET = np.array([4, 1, 2], np.uint32)
BASE_LOGITS = np.array([0.6, 0.0, -0.3], np.float32)
HEAD = MarkovHead(
    MarkovKind.VANILLA, np.eye(VOCAB_SIZE, dtype=np.float32), _rng.normal(0.0, 0.25, (3, VOCAB_SIZE)).astype(np.float32)
)
CONFIDENCE = ConfidenceHead(np.array([[0.0, -1.0, 2.0, -1.0, 2.0, -1.0]], np.float32))  # by the token before


class Draft(NamedTuple):
    """One request's block, with what acceptance reads."""

    token_ids: npt.NDArray[np.uint32]
    confidence_logits: npt.NDArray[np.float32]
    probs: npt.NDArray[np.float32]
    position: int  # of the anchor


def lagged_length(draft: Draft, older: Draft | None) -> int:
    """First round: early stop on what was known before each draft. Later: an older confidence at the same position."""
    if older is None:
        return 1 + int(draft.confidence_logits[1] > 0.0)
    slot = draft.position - older.position  # of the older block, same position as this block's slot 0
    if slot + 1 >= BLOCK_SIZE:
        return 1
    return 2 if older.confidence_logits[slot + 1] > 0.0 else 0  # read after the older draft of that position


def whole_block_length(draft: Draft, older: Draft | None) -> int:
    """Wrong: whether slot 0 is verified depends on the confidence read after its draft (paper, appendix A)."""
    return 2 if draft.confidence_logits[1] > 0.0 else 0


def full_length(draft: Draft, older: Draft | None) -> int:
    """The whole block."""
    return BLOCK_SIZE


def no_length(draft: Draft, older: Draft | None) -> int:
    """Nothing: plain decoding."""
    return 0


@dataclass(frozen=True)
class Rules:
    """What an engine does around the kernels."""

    accept: Callable[..., RowOutcome] = accept_row
    length: Callable[[Draft, Draft | None], int] = lagged_length
    reuses_draft_noise: bool = False


def accept_always(
    logits: npt.NDArray[np.float32],
    draft_ids: npt.NDArray[np.uint32],
    draft_probs: npt.NDArray[np.float32],
    draft_to_target: npt.NDArray[np.uint32],
    sampling: SlotSampling,
    position: int,
    round_: int,
) -> RowOutcome:
    """Wrong: every draft survives."""
    last = logits[-1:]
    bonus = accept_row(last, draft_ids[:0], None, None, sampling, position + len(draft_ids), round_)
    return RowOutcome(len(draft_ids), [*draft_ids.tolist(), *bonus.token_ids])


def recover_from_target(
    logits: npt.NDArray[np.float32],
    draft_ids: npt.NDArray[np.uint32],
    draft_probs: npt.NDArray[np.float32],
    draft_to_target: npt.NDArray[np.uint32],
    sampling: SlotSampling,
    position: int,
    round_: int,
) -> RowOutcome:
    """Wrong: the recovered token comes from the target instead of the residual."""
    outcome = accept_row(logits, draft_ids, draft_probs, draft_to_target, sampling, position, round_)
    k = outcome.accepted_len
    if k == len(draft_ids):
        return outcome
    probs = reference.target_probs(logits[k : k + 1], sampling)[0]
    chance = uniforms(sampling.key, Purpose.RESIDUAL, position + 1 + k, round_, 1)[0]
    return RowOutcome(k, [*outcome.token_ids[:-1], inverse_cdf_index(probs, chance)])


def bonus_from_row_before(
    logits: npt.NDArray[np.float32],
    draft_ids: npt.NDArray[np.uint32],
    draft_probs: npt.NDArray[np.float32],
    draft_to_target: npt.NDArray[np.uint32],
    sampling: SlotSampling,
    position: int,
    round_: int,
) -> RowOutcome:
    """Wrong: the bonus comes from the row of the last draft."""
    rows = logits.copy()
    rows[-1] = logits[max(len(draft_ids) - 1, 0)]
    return accept_row(rows, draft_ids, draft_probs, draft_to_target, sampling, position, round_)


def judge_without_bias(
    logits: npt.NDArray[np.float32],
    draft_ids: npt.NDArray[np.uint32],
    draft_probs: npt.NDArray[np.float32],
    draft_to_target: npt.NDArray[np.uint32],
    sampling: SlotSampling,
    position: int,
    round_: int,
) -> RowOutcome:
    """Wrong: draft probabilities are not those that were sampled from."""
    probs = np.exp(BASE_LOGITS) / np.exp(BASE_LOGITS).sum()
    other = np.tile(probs, (len(draft_ids), 1))
    return accept_row(logits, draft_ids, other, draft_to_target, sampling, position, round_)


def generate(
    keys: range, base: SlotSampling, rules: Rules, base_logits: npt.NDArray[np.float32] = BASE_LOGITS
) -> list[list[int]]:
    """First NUM_TOKENS emitted tokens of a request for every key."""
    requests = [SlotSampling(base.regime, base.temperature, base.top_k, base.top_p, base.min_p, key) for key in keys]
    emitted: list[list[int]] = [[] for _ in keys]
    older: list[Draft | None] = [None for _ in keys]
    round_ = 0
    while active := [i for i, tokens in enumerate(emitted) if len(tokens) < NUM_TOKENS]:
        round_ += 1
        num_rows = len(active)
        anchor_ids = np.array([(emitted[i] or [ANCHOR_ID])[-1] for i in active], np.uint32)
        positions = np.array([ANCHOR_POSITION + len(emitted[i]) for i in active])
        probs = np.full((num_rows, BLOCK_SIZE, DRAFT_TO_TARGET.size), np.nan, np.float32)
        block = sample_block(
            np.tile(base_logits, (num_rows, BLOCK_SIZE, 1)),
            np.zeros((num_rows, BLOCK_SIZE, 1), np.float32),
            HEAD,
            CONFIDENCE,
            anchor_ids,
            [requests[i] for i in active],
            positions,
            np.full(num_rows, 1 if rules.reuses_draft_noise else round_),
            DRAFT_TO_TARGET,
            list(probs),
        )
        for b, i in enumerate(active):
            draft = Draft(block.token_ids[b], block.confidence_logits[b], probs[b], int(positions[b]))
            length = rules.length(draft, older[i])
            logits = TARGET_LOGITS[[anchor_ids[b], *draft.token_ids[:length]]]
            outcome = rules.accept(
                logits,
                draft.token_ids[:length],
                draft.probs[:length],
                DRAFT_TO_TARGET,
                requests[i],
                draft.position,
                round_,
            )
            emitted[i] += outcome.token_ids
            older[i] = draft
    return [tokens[:NUM_TOKENS] for tokens in emitted]


def chi_square_excess(samples: list[list[int]], sampling: SlotSampling) -> float:
    """Pearson's statistic divided by its critical value; above 1 the samples do not follow the target."""
    steps = reference.target_probs(TARGET_LOGITS, sampling)
    counts = dict.fromkeys(itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS), 0)
    for tokens in samples:
        counts[tuple(tokens)] += 1
    paths = np.array([[ANCHOR_ID, *path] for path in counts])
    expected = len(samples) * np.prod(steps[paths[:, :-1], paths[:, 1:]], axis=1)
    observed = np.array(list(counts.values()))
    if observed[expected == 0.0].any():
        return np.inf
    is_rare = expected < 5.0
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    keep = expected > 0.0
    statistic = float((((observed - expected)[keep]) ** 2 / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    spread = 2.0 / (9.0 * freedom)  # Wilson and Hilferty's approximation of the chi-square quantile
    return statistic / (freedom * (1.0 - spread + NORMAL_QUANTILE * spread**0.5) ** 3)


@pytest.mark.parametrize(
    ("sampling", "length"),
    [
        (SlotSampling(Regime.REJECTION), lagged_length),
        (SlotSampling(Regime.REJECTION), full_length),
        (SlotSampling(Regime.REJECTION, temperature=1.4, top_k=4, top_p=0.9, min_p=0.02), lagged_length),
    ],
    ids=["trimmed windows", "whole blocks", "filtered target"],
)
def test_output_follows_the_target(sampling: SlotSampling, length: Callable[[Draft, Draft | None], int]) -> None:
    samples = generate(range(NUM_REQUESTS), sampling, Rules(length=length))
    assert chi_square_excess(samples, sampling) < 1.0


@pytest.mark.parametrize(
    "rules",
    [
        Rules(accept=accept_always),
        Rules(accept=recover_from_target),
        Rules(accept=bonus_from_row_before),
        Rules(accept=judge_without_bias),
        Rules(length=whole_block_length),
        Rules(reuses_draft_noise=True),
    ],
    ids=["always accept", "target as residual", "bonus row", "other draft probs", "whole-block length", "noise reuse"],
)
def test_statistic_rejects_wrong_rules(rules: Rules) -> None:
    sampling = SlotSampling(Regime.REJECTION)
    samples = generate(range(NUM_REQUESTS), sampling, rules)
    assert chi_square_excess(samples, sampling) > 1.0


@pytest.mark.parametrize(
    "sampling",
    [SlotSampling(Regime.GREEDY), SlotSampling(Regime.COUPLED), SlotSampling(Regime.COUPLED, 0.8, top_p=0.9)],
    ids=["greedy", "coupled", "coupled and filtered"],
)
@pytest.mark.parametrize("length", [lagged_length, full_length, whole_block_length, no_length])
def test_greedy_and_coupled_output_is_the_targets_own(
    sampling: SlotSampling, length: Callable[[Draft, Draft | None], int]
) -> None:
    keys = range(2**64 - 60, 2**64)
    expected = []
    for key in keys:
        tokens = [ANCHOR_ID]
        for position in range(ANCHOR_POSITION + 1, ANCHOR_POSITION + 1 + NUM_TOKENS):
            probs = reference.target_probs(TARGET_LOGITS[tokens[-1:]], sampling)[0]
            noise = 1.0 if sampling.regime == Regime.GREEDY else coupled_exponentials(key, position, VOCAB_SIZE)
            tokens.append(int(np.argmax(probs / noise)))
        expected.append(tokens[1:])
    assert generate(keys, sampling, Rules(length=length)) == expected
    other_drafter = np.array([-1.0, 0.0, 2.0], np.float32)
    assert generate(keys, sampling, Rules(length=length), other_drafter) == expected
