"""No sort: a program a row counts, for each of its drafts, the drafts of all rows that are ranked before it.

R * G is a few thousand at most, and comparisons need no atomic additions, so the result is the reference's exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128
"""Drafts that are compared with at once."""


@triton.jit
def verify_lens_kernel(
    survivals_ptr, survivals_stride, limits_ptr, budget_ptr, lens_ptr, num_rows, num_slots,
    MAX_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Verify length of row `program_id(0)`."""
    row = tl.program_id(0)
    limit = tl.load(limits_ptr + row)
    if limit < 0:
        return
    slots = tl.arange(0, MAX_SLOTS)
    is_own = slots < tl.minimum(limit, num_slots)
    own = tl.load(survivals_ptr + row * survivals_stride + slots, is_own, other=0.0)
    is_own &= own > 0.0
    num_before = tl.zeros([MAX_SLOTS], tl.int32)
    for start in range(0, num_rows * num_slots, BLOCK):
        places = start + tl.arange(0, BLOCK)
        rows, positions = places // num_slots, places % num_slots
        limits = tl.load(limits_ptr + rows, rows < num_rows, other=-1)
        others = tl.load(survivals_ptr + rows * survivals_stride + positions, positions < limits, other=0.0)
        is_higher = others[None, :] > own[:, None]
        is_earlier = (positions[None, :] < slots[:, None]) | (
            (positions[None, :] == slots[:, None]) & (rows[None, :] < row)
        )
        is_before = (is_higher | ((others[None, :] == own[:, None]) & is_earlier)) & (others[None, :] > 0.0)
        num_before += tl.sum(is_before.to(tl.int32), 1)
    is_chosen = is_own & (num_before < tl.load(budget_ptr))
    tl.store(lens_ptr + row, tl.sum(is_chosen.to(tl.int32), 0))


def verify_lens(survivals: Tensor, limits: Tensor, budget: Tensor, lens: Tensor) -> None:
    """Writes `lens` [R] (see the package)."""
    num_rows, num_slots = survivals.shape
    verify_lens_kernel[(num_rows,)](
        survivals, survivals.stride(0), limits, budget, lens, num_rows, num_slots,
        MAX_SLOTS=triton.next_power_of_2(num_slots), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
