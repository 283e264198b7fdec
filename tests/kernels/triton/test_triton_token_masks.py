"""Token masks on the device, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.token_masks.reference import mask_logits as reference
from kernels.token_masks.triton import lift_controls, mask_logits, mask_windows


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


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_windows_name_their_masks() -> None:
    """Two rows, none of the third request's, one unmasked and one of nobody."""
    masks = torch.tensor([[7], [0b101], [0b110]], dtype=torch.int32)
    logits = torch.zeros(4, 3, dtype=torch.bfloat16)
    mask_windows(logits, ints(0, 0, 2, -1), ints(0, 2, 2), masks, ints(1, 0, -1))
    assert logits.isneginf().tolist() == [[False, True, False], [True, False, False], [False] * 3, [False] * 3]


def test_controls_are_lifted_where_they_leave_nothing_that_is_allowed() -> None:
    """Of four masked windows the second is all banned and the third too, without controls; a NaN is something left."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.standard_normal((5, 100)).astype(np.float32))
    masks = torch.from_numpy(rng.integers(-(2**31), 2**31, (4, 4), dtype=np.int32))
    window = torch.arange(5, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    masked = logits.clone()
    mask_windows(masked, *window, masks, ints(3, 2, 1, 0, -1))
    changed = masked - 1
    changed[1:] = -torch.inf
    changed[3, 70] = torch.nan
    expected = changed.clone()
    expected[1] = masked[1]
    lift_controls(changed, logits, *window, masks, ints(3, 2, 1, 0, -1), ints(0, 2, -1, 1, 4))
    torch.testing.assert_close(changed, expected, rtol=0, atol=0, equal_nan=True)
