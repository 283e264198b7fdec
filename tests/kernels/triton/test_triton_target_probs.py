"""Filtered target distributions of many rows at once, against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.sampling import Regime, SlotSampling
from kernels.target_probs import InvalidRowError
from kernels.target_probs.reference import target_probs as reference
from kernels.target_probs.triton import target_probs, target_probs_of
from kernels.triton.rows import SamplingRows

SAMPLINGS = [
    SlotSampling(Regime.GREEDY),
    SlotSampling(Regime.REJECTION, temperature=0.7),
    SlotSampling(Regime.COUPLED, top_k=1),
    SlotSampling(Regime.COUPLED, top_k=20, top_p=0.8),
    SlotSampling(Regime.REJECTION, temperature=1.3, top_p=0.6),
    SlotSampling(Regime.REJECTION, top_p=1e-9),
    SlotSampling(Regime.REJECTION, top_p=0.95, min_p=0.1),
    SlotSampling(Regime.REJECTION, top_k=1000, min_p=0.02),
]
BLOCK = 64
"""Tokens of a tile: 63 and 70 are one and two, 100 two."""


@pytest.mark.parametrize(("vocab_size", "dtype"), [(63, torch.bfloat16), (100, torch.float32)])
def test_every_filter_in_one_launch(vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    num_rows = len(SAMPLINGS) + 2
    logits = torch.from_numpy(3 * rng.standard_normal((num_rows, vocab_size)).astype(np.float32)).to(dtype)
    logits[3, 5:50] = logits[3, 7]  # equals over several tiles, of which top-k takes some
    logits[4, 1::3] = -math.inf
    request_of_row = torch.tensor([7, 6, 5, -1, 4, 3, 2, 1, 0, -1], dtype=torch.int32)
    probs = torch.full((num_rows, vocab_size), math.nan, dtype=torch.float64)
    target_probs_of(logits, request_of_row, SamplingRows.of(SAMPLINGS), probs, BLOCK)
    for row, request in enumerate(request_of_row.tolist()):
        if request < 0:
            assert probs[row].isnan().all()
            continue
        expected = reference(logits[row : row + 1].float().numpy(), SAMPLINGS[request])[0]
        np.testing.assert_array_equal(probs[row].numpy() > 0, expected > 0)
        np.testing.assert_allclose(probs[row].numpy(), expected, rtol=1e-5)


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lower_id() -> None:
    logits = torch.zeros(2, 70)
    logits[:, 10:20] = -0.0
    samplings = [SlotSampling(Regime.COUPLED, top_k=33), SlotSampling(Regime.COUPLED, top_p=0.499)]
    probs = torch.full((2, 70), math.nan, dtype=torch.float64)
    target_probs_of(logits, torch.tensor([0, 1], dtype=torch.int32), SamplingRows.of(samplings), probs, BLOCK)
    assert np.flatnonzero(probs[0].numpy()).tolist() == list(range(33))
    assert np.flatnonzero(probs[1].numpy()).tolist() == list(range(35))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((3, 100)).astype(np.float32))
    rows = SamplingRows.of([SAMPLINGS[place] for place in (3, 4, 1)])
    alone, together = (torch.full((3, 100), math.nan, dtype=torch.float64) for _ in range(2))
    target_probs_of(logits, torch.arange(3, dtype=torch.int32), rows, together, BLOCK)
    for row in range(3):
        own = slice(row, row + 1)
        target_probs_of(logits[own], torch.tensor([row], dtype=torch.int32), rows, alone[own], BLOCK)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("values", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_rows_of_which_no_distribution_can_be_made(values: list[float]) -> None:
    with pytest.raises(InvalidRowError):
        target_probs(np.array([values], np.float32), SlotSampling(Regime.REJECTION, top_p=0.5))
