"""Packing and its way back without a value read on the host; copies of bits, so equal to the reference exactly."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ROWS = 16
"""Packed rows whose requests a program looks up."""
_MAX_BLOCK = 2048
"""Elements that a program copies."""


@triton.jit
def index_kernel(
    row_lens_ptr, row_starts_ptr, request_of_row_ptr, num_requests, num_rows,
    MAX_REQUESTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """The requests of BLOCK_ROWS rows; the first program writes all starts."""
    requests = tl.arange(0, MAX_REQUESTS)
    is_request = requests < num_requests
    lens = tl.maximum(tl.load(row_lens_ptr + requests, is_request, other=0), 0)
    ends = tl.cumsum(lens, 0)
    if tl.program_id(0) == 0:
        tl.store(row_starts_ptr + requests, ends - lens, is_request)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # As many requests end before a row as precede the one that it belongs to.
    owner = tl.sum((is_request[None, :] & (ends[None, :] <= rows[:, None])).to(tl.int32), 1)
    tl.store(request_of_row_ptr + rows, tl.where(owner < num_requests, owner, -1), rows < num_rows)


@triton.jit
def copy_kernel(
    padded_ptr, packed_ptr, row_starts_ptr, request_of_row_ptr, num_places, row_size,
    IS_PACKING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Part `program_id(1)` of packed row `program_id(0)`, to or from its request's place."""
    row = tl.program_id(0)
    request = tl.load(request_of_row_ptr + row)
    if request < 0:
        return
    place = request.to(tl.int64) * num_places + (row - tl.load(row_starts_ptr + request))
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < row_size
    padded, packed = padded_ptr + place * row_size + elements, packed_ptr + row.to(tl.int64) * row_size + elements
    if IS_PACKING:
        tl.store(packed, tl.load(padded, is_element, other=0), is_element)
    else:
        tl.store(padded, tl.load(packed, is_element, other=0), is_element)


def index_rows(row_lens: Tensor, row_starts: Tensor, request_of_row: Tensor) -> None:
    """Writes where rows are and whose they are (see the package)."""
    num_requests, num_rows = len(row_lens), len(request_of_row)
    index_kernel[(triton.cdiv(num_rows, _BLOCK_ROWS),)](
        row_lens, row_starts, request_of_row, num_requests, num_rows,
        MAX_REQUESTS=triton.next_power_of_2(num_requests), BLOCK_ROWS=_BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


def pack_rows(source: Tensor, row_starts: Tensor, request_of_row: Tensor, packed: Tensor) -> None:
    """Writes rows to the front (see the package)."""
    _copy(source, packed, row_starts, request_of_row, is_packing=True)


def scatter_rows(packed: Tensor, row_starts: Tensor, request_of_row: Tensor, target: Tensor) -> None:
    """Writes rows back (see the package)."""
    _copy(target, packed, row_starts, request_of_row, is_packing=False)


def _copy(padded: Tensor, packed: Tensor, row_starts: Tensor, request_of_row: Tensor, *, is_packing: bool) -> None:
    row_size = packed[0].numel()
    block = min(_MAX_BLOCK, triton.next_power_of_2(row_size))
    copy_kernel[len(packed), triton.cdiv(row_size, block)](
        padded, packed, row_starts, request_of_row, padded.shape[1], row_size,
        IS_PACKING=is_packing, BLOCK=block, num_warps=4,
    )  # fmt: skip
