"""Which row counts of a linear layer give each row the bits that it has at any other of these counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COUNTS = (*range(1, 18), 33, 64)
"""Every count of a small step, and two of prefill chunks."""


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two float32 tensors of one shape hold the same bits (so that NaN equals itself, and 0 is not -0)."""
    return torch.equal(first.contiguous().view(torch.int32), second.contiguous().view(torch.int32))


def exact_counts(
    layer: Callable[[Tensor], Tensor], num_in: int, counts: Sequence[int] = COUNTS, seed: int = 0
) -> tuple[int, ...]:
    """The largest set among `counts` at which a row's result depends on that row alone; empty if there is none.

    `layer` maps float32 [M, num_in] to [M, num_out]. Each count is computed three times, with its rows in order, in
    reverse and moved on by one, so that every row changes its place and its neighbours.
    """
    rows = torch.randn(max(counts), num_in, generator=torch.Generator().manual_seed(seed))
    results = {}
    for count in counts:
        some = rows[:count]
        result = layer(some)
        if same_bits(result, layer(some.flip(0)).flip(0)) and same_bits(result, layer(some.roll(1, 0)).roll(-1, 0)):
            results[count] = result
    sets: list[list[int]] = []
    for count in sorted(results, reverse=True):  # the largest of a set has every row that the others have
        agreeing = (members for members in sets if same_bits(results[members[0]][:count], results[count]))
        if (members := next(agreeing, None)) is not None:
            members.append(count)
        else:
            sets.append([count])
    sets.sort(key=len)
    return tuple(sorted(sets[-1])) if sets else ()
