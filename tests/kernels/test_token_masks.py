"""Masks on logits: a worked example, and the fast form against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.token_masks import cpu, reference


@pytest.mark.parametrize("mask_logits", [reference.mask_logits, cpu.mask_logits], ids=["ref", "cpu"])
def test_a_worked_example(mask_logits: Any) -> None:
    logits = np.arange(35, dtype=np.float32)[None].copy()
    mask_logits(logits, np.array([[0b1010, 0b100]], np.uint32))
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [1, 3, 34]
    assert logits[0, [1, 3, 34]].tolist() == [1.0, 3.0, 34.0]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 63, 100, 1000])
def test_the_fast_form_equals_the_reference(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0.0, 3.0, (3, vocab_size)).astype(np.float32)
    masks = rng.integers(0, 2**32, (4, -(-vocab_size // 32)), dtype=np.uint32)[1:]  # a part of an arena
    expected = logits.copy()
    reference.mask_logits(expected, masks)
    cpu.mask_logits(logits, masks)
    np.testing.assert_array_equal(logits, expected)
    assert np.isneginf(expected).any() or vocab_size < 31
