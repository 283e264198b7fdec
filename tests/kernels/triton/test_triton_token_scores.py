"""Scores of tokens on the device, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.token_scores.reference import token_score as reference
from kernels.token_scores.triton import Scores, score_windows, token_score


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


def test_tokens_of_windows() -> None:
    """What requests emitted, accepted drafts included; one asks for nothing, rows behind a rejection have no token."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((7, 63)).astype(np.float32)
    token_ids = torch.from_numpy(rng.integers(0, 63, (3, 3), dtype=np.int32))
    scores = Scores(
        torch.full((3, 3), torch.nan, dtype=torch.float64),
        torch.full((3, 3), -7, dtype=torch.int32),
        torch.full((3, 3, 4), -7, dtype=torch.int32),
        torch.full((3, 3, 4), torch.nan, dtype=torch.float64),
    )
    request_of_row, row_starts, accepted_lens, num_top = (
        torch.tensor(values, dtype=torch.int32) for values in ([0, 0, 0, 1, 2, 2, -1], [0, 3, 4], [1, 0, 1], [4, -1, 0])
    )
    score_windows(torch.from_numpy(logits), request_of_row, row_starts, accepted_lens, token_ids, num_top, scores)
    for request, k, row, count in ((0, 0, 0, 4), (0, 1, 1, 4), (2, 0, 4, 0), (2, 1, 5, 0)):
        expected = reference(logits[row], int(token_ids[request, k]), count)
        assert scores.ranks[request, k] == expected.rank
        assert tuple(scores.top_ids[request, k, :count].tolist()) == expected.top_ids
        np.testing.assert_allclose(scores.logprobs[request, k], expected.logprob, rtol=1e-5)
        np.testing.assert_allclose(scores.top_logprobs[request, k, :count], expected.top_logprobs, rtol=1e-5)
    assert int((scores.ranks == -7).sum()) == 5
    assert int((scores.top_ids == -7).sum()) == 36 - 8
