"""The block-accept estimator against simulated truth: what whole blocks would have been accepted."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from scheduler_service.policy.block_accept import BlockAcceptEstimator, BlockRound, Interval

VOCAB_SIZE, BLOCK_SIZE, NUM_TOKENS = 4, 4, 24


def _greedy(position: int, drafts: list[int], verify_len: int, committed: list[int]) -> BlockRound:
    return BlockRound(position, drafts, verify_len, len(committed) - 1, committed)


def _interval(*rounds: BlockRound, is_ended: bool = False) -> Interval:
    estimator: BlockAcceptEstimator[str] = BlockAcceptEstimator()
    for each in rounds:
        estimator.observe("row", each)
    if is_ended:
        estimator.finish("row")
        assert not estimator.waiting
    return estimator.interval()


def test_nothing_seen() -> None:
    assert BlockAcceptEstimator().interval() == Interval(0.0, 0.0, 0, 0)


def test_whole_and_rejected_blocks_are_known_at_once() -> None:
    assert _interval(_greedy(7, [1, 2, 3], 3, [1, 2, 3, 9])) == Interval(4.0, 4.0, 1, 0)
    assert _interval(_greedy(7, [1, 2, 3], 2, [1, 9])) == Interval(2.0, 2.0, 1, 0)
    assert _interval(_greedy(7, [1, 2, 3], 1, [9])) == Interval(1.0, 1.0, 1, 0)


def test_trimmed_drafts_are_settled_by_the_tokens_that_come() -> None:
    first = _greedy(7, [1, 2, 3, 4], 1, [1, 2])
    assert _interval(first) == Interval(3.0, 5.0, 1, 1)
    assert _interval(_greedy(7, [1, 2, 3, 4], 1, [1, 9])) == Interval(2.0, 2.0, 1, 0)
    plain = BlockRound(9, [], 0, 0, [3])
    assert _interval(first, plain) == Interval(4.0, 5.0, 1, 1)
    assert _interval(first, plain, BlockRound(10, [], 0, 0, [4])) == Interval(5.0, 5.0, 1, 0)
    assert _interval(first, plain, BlockRound(10, [], 0, 0, [9])) == Interval(4.0, 4.0, 1, 0)
    # The next block is trimmed as well; its token settles both.
    assert _interval(first, _greedy(9, [3, 9, 9], 0, [3])) == Interval((4 + 2) / 2, (5 + 4) / 2, 2, 2)


def test_the_end_of_a_text() -> None:
    first = _greedy(7, [1, 2, 3, 4], 1, [1, 2])
    assert _interval(first, is_ended=True) == Interval(3.0, 5.0, 1, 1)
    assert _interval(_greedy(7, [1, 2], 1, [1, 2]), is_ended=True) == Interval(3.0, 3.0, 1, 0)  # 2 was the stop token
    cut = BlockRound(7, [1, 2], 2, 2, [1, 2])  # the text ended with the second draft
    assert _interval(cut, is_ended=True) == Interval(3.0, 3.0, 1, 0)


def test_rows_are_apart() -> None:
    estimator: BlockAcceptEstimator[str] = BlockAcceptEstimator()
    estimator.observe("a", _greedy(7, [1, 2, 3], 1, [1, 2]))
    estimator.observe("b", _greedy(9, [3, 3], 0, [5]))
    assert estimator.interval() == Interval((3 + 1) / 2, (4 + 1) / 2, 2, 1)


def test_rejection_rows_are_settled_by_probability() -> None:
    target = {(8, 1): 0.3, (9, 2): 0.9, (10, 3): 0.1}

    def settle(committed: list[int], plain: list[int]) -> Interval:
        first = BlockRound(7, [1, 2, 3], 0, 0, committed, (0.6, 0.5, 0.4), lambda p, t: target[p, t])
        return _interval(first, *(BlockRound(8 + i, [], 0, 0, [t], (), first.target_prob) for i, t in enumerate(plain)))

    # Accepted with 1/2, then surely, then with 1/4; the target chose the drafts itself.
    assert settle([1], [2, 3]) == pytest.approx(Interval(1 + 0.5 + 0.5 + 0.125, 1 + 0.5 + 0.5 + 0.125, 1, 0))
    # It chose another token: what is behind is reached with 1/2 at most.
    assert settle([0], []) == pytest.approx(Interval(1.5, 1.5 + 2 * 0.5, 1, 1))
    assert settle([1], [0]) == pytest.approx(Interval(2.0, 2.0 + 0.5, 1, 1))
    with pytest.raises(ValueError, match="target probabilities"):
        _interval(BlockRound(7, [1], 0, 0, [1], (0.5,)))


def test_what_is_not_known_of_a_rejection_row_stays_open() -> None:
    known = {(8, 1): 0.3, (9, 2): math.nan}
    first = BlockRound(7, [1, 2, 3], 0, 0, [1], (0.6, 0.5, 0.4), lambda p, t: known[p, t])
    then = BlockRound(8, [], 0, 0, [2], (), first.target_prob)
    assert _interval(first, then) == pytest.approx(Interval(1.5, 1.5 + 2 * 0.5, 1, 1))
    for draft_prob in (0.0, math.nan):
        assert _interval(first._replace(draft_probs=(draft_prob, 0.5, 0.4))) == Interval(1.0, 4.0, 1, 1)


def test_a_row_wants_probabilities_where_its_text_may_still_agree() -> None:
    estimator: BlockAcceptEstimator[str] = BlockAcceptEstimator()
    probs = {(8, 1): 0.5}
    estimator.observe("row", BlockRound(7, [1, 2, 3, 4], 0, 0, [1], [0.5] * 4, lambda p, t: probs[p, t]))
    estimator.observe("greedy", BlockRound(7, [1, 2, 3, 4], 0, 0, [1]))
    assert estimator.wanted("row", 8, []) == [(9, 2)]
    assert estimator.wanted("row", 8, [2, 3, 4, 5]) == [(9, 2), (10, 3), (11, 4)]
    assert estimator.wanted("row", 8, [2, 9, 4]) == [(9, 2), (10, 3)]  # past a 9 that is accepted nothing agrees
    assert estimator.wanted("row", 9, []) == [(10, 3)]  # behind a token that is not known yet
    assert (
        estimator.wanted("row", 12, [1]) == estimator.wanted("other", 8, []) == estimator.wanted("greedy", 8, []) == []
    )


class _Models(NamedTuple):
    target: np.ndarray
    """[previous, next]."""
    drafter: np.ndarray


def _models(generator: np.random.Generator, temperature: float) -> _Models:
    target = generator.dirichlet([temperature] * VOCAB_SIZE, VOCAB_SIZE)
    return _Models(target, 0.7 * target + 0.3 * generator.dirichlet([1.0] * VOCAB_SIZE, VOCAB_SIZE))


class _Run(NamedTuple):
    interval: Interval
    expected: float
    """Mean of what was accepted, the trimmed rest in expectation."""
    accepted_lens: list[int]
    """Of whole blocks, as cap-accept would see them."""
    censored: float
    """Mean of what was accepted within the windows."""


def _simulate(generator: np.random.Generator, models: _Models, num_texts: int, *, is_greedy: bool) -> _Run:
    """Texts by speculation with windows that the drafts have no say in; the truth of every block beside it."""
    estimator: BlockAcceptEstimator[int] = BlockAcceptEstimator()
    expected, censored, accepted_lens = 0.0, 0, []
    for key in range(num_texts):
        text = [int(generator.integers(VOCAB_SIZE))]
        while len(text) <= NUM_TOKENS:
            anchor = len(text) - 1
            drafts: list[int] = []
            for _ in range(BLOCK_SIZE):
                previous = [*text, *drafts][-1]
                drafts.append(int(generator.choice(VOCAB_SIZE, p=models.drafter[previous])))
            before = [text[-1], *drafts]
            target = [models.target[token] for token in before]
            if is_greedy:
                target = [np.eye(VOCAB_SIZE)[row.argmax()] for row in target]
                chances = [float(row[token]) for row, token in zip(target, drafts, strict=False)]
            else:
                draft_rows = [models.drafter[token] for token in before]
                chances = [
                    min(1.0, float(row[x] / q[x])) for row, q, x in zip(target, draft_rows, drafts, strict=False)
                ]
            verdicts = [float(generator.random()) < chance for chance in chances]
            would_accept = verdicts.index(False) if False in verdicts else BLOCK_SIZE
            verify_len = int(generator.integers(BLOCK_SIZE + 1)) if len(text) % 3 else 1
            num_accepted = min(would_accept, verify_len)
            weights = target[num_accepted]
            if num_accepted < verify_len and not is_greedy:
                weights = np.maximum(weights - models.drafter[before[num_accepted]], 0.0)
            token = int(generator.choice(VOCAB_SIZE, p=weights / weights.sum()))
            committed = [*drafts[:num_accepted], token]
            accepted_lens.append(1 + would_accept)
            censored += 1 + num_accepted
            expected += 1 + num_accepted
            if num_accepted == verify_len:
                expected += float(np.cumprod(chances[verify_len:]).sum())
            text += committed

            def target_prob(position: int, token_id: int, text: list[int] = text) -> float:
                return float(models.target[text[position - 1], token_id])

            probs = [] if is_greedy else [float(models.drafter[a, b]) for a, b in zip(before, drafts, strict=False)]
            estimator.observe(key, BlockRound(anchor, drafts, verify_len, num_accepted, committed, probs, target_prob))
        estimator.finish(key)
    num_blocks = len(accepted_lens)
    return _Run(estimator.interval(), expected / num_blocks, accepted_lens, censored / num_blocks)


@pytest.mark.parametrize("seed", range(5))
def test_greedy_texts_tell_all_but_their_ends(seed: int) -> None:
    generator = np.random.default_rng(seed)
    run = _simulate(generator, _models(generator, 0.3), 40, is_greedy=True)
    truth = sum(run.accepted_lens) / len(run.accepted_lens)
    assert run.interval.num_blocks == len(run.accepted_lens)
    assert run.censored + 0.1 < run.interval.low <= truth <= run.interval.high
    assert run.interval.num_open <= 40 * 2
    # Open blocks alone are unknown, each by less than a block.
    assert run.interval.high - run.interval.low < run.interval.num_open * BLOCK_SIZE / run.interval.num_blocks


@pytest.mark.parametrize("seed", range(5))
def test_rejection_texts_bound_what_cap_accept_would_see(seed: int) -> None:
    generator = np.random.default_rng(100 + seed)
    run = _simulate(generator, _models(generator, 0.3), 60, is_greedy=False)
    low, high, num_blocks, _ = run.interval
    assert run.censored + 0.1 < low <= run.expected + 1e-9
    assert run.expected <= high + 1e-9
    assert low < high < 1 + BLOCK_SIZE
    # cap-accept's own mean differs from the expectation by its draws: 4 standard errors.
    error = 4 * float(np.std(run.accepted_lens)) / math.sqrt(num_blocks)
    assert low - error <= sum(run.accepted_lens) / num_blocks <= high + error
