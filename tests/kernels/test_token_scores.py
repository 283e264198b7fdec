"""Log-probabilities of tokens: a worked example, and the fast form against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.token_scores import TokenScore, cpu, reference

HALVES = np.log(np.array([0.125, 0.5, 0.125, 0.25], np.float32)) + 7


@pytest.mark.parametrize("token_score", [reference.token_score, cpu.token_score], ids=["ref", "cpu"])
def test_a_worked_example(token_score: object) -> None:
    score = token_score(HALVES, 2, 3)  # type: ignore[operator]
    assert (score.rank, score.top_ids) == (3, (1, 3, 0))
    np.testing.assert_allclose([score.logprob, *score.top_logprobs], np.log([0.125, 0.5, 0.25, 0.125]), rtol=1e-6)


@pytest.mark.parametrize("num_top", [0, 1, 20, 5000])
def test_the_fast_form_equals_the_reference(num_top: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        logits = rng.normal(0.0, 6.0, 1000).round(1).astype(np.float32)  # with equal logits
        token_id = int(rng.integers(1000))
        fast: TokenScore = cpu.token_score(logits, token_id, num_top)
        true = reference.token_score(logits, token_id, num_top)
        assert (fast.rank, fast.top_ids) == (true.rank, true.top_ids)
        np.testing.assert_allclose([fast.logprob, *fast.top_logprobs], [true.logprob, *true.top_logprobs], atol=1e-5)
