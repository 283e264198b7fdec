"""Scores of tokens on the device, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.token_scores.reference import token_score as reference
from kernels.token_scores.triton import token_score


@pytest.mark.parametrize(("vocab_size", "num_top"), [(63, 0), (100, 5), (3, 9)])
def test_scores(vocab_size: int, num_top: int) -> None:
    logits = np.random.default_rng(vocab_size).integers(-4, 5, vocab_size).astype(np.float32)  # many equal ones
    logits[1] = -np.inf
    for token_id in (0, vocab_size - 1):
        expected, own = reference(logits, token_id, num_top), token_score(logits, token_id, num_top)
        assert own.rank == expected.rank
        assert own.top_ids == expected.top_ids
        np.testing.assert_allclose(own.logprob, expected.logprob, rtol=1e-5)
        np.testing.assert_allclose(own.top_logprobs, expected.top_logprobs, rtol=1e-5)
