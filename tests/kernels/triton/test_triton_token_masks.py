"""Token masks on the device, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.token_masks.reference import mask_logits as reference
from kernels.token_masks.triton import mask_logits, mask_rows


@pytest.mark.parametrize("vocab_size", [63, 100])
def test_bits(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    masks = rng.integers(0, 2**32, (3, -(-vocab_size // 32)), dtype=np.uint32)
    masks[0], masks[1] = 0, 2**32 - 1
    logits = rng.standard_normal((3, vocab_size)).astype(np.float32)
    expected, own = logits.copy(), logits.copy()
    reference(expected, masks)
    mask_logits(own, masks)
    np.testing.assert_array_equal(own, expected)


def test_rows_name_their_masks() -> None:
    masks = torch.tensor([[0], [0b101]], dtype=torch.int32)
    logits = torch.zeros(3, 4, dtype=torch.bfloat16)
    mask_rows(logits, masks, torch.tensor([1, -1, 0], dtype=torch.int32))
    assert logits.isneginf().tolist() == [[False, True, False, True], [False] * 4, [True] * 4]
