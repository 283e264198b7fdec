"""The truth: one row at a time."""

from __future__ import annotations

from torch import Tensor


def index_rows(row_lens: Tensor, row_starts: Tensor, request_of_row: Tensor) -> None:
    """Writes where rows are and whose they are (see the package)."""
    request_of_row[:] = -1
    start = 0
    for request, row_len in enumerate(row_lens.tolist()):
        row_starts[request] = start
        request_of_row[start : start + max(0, row_len)] = request
        start += max(0, row_len)


def pack_rows(source: Tensor, row_starts: Tensor, request_of_row: Tensor, packed: Tensor) -> None:
    """Writes rows to the front (see the package)."""
    for row, request in enumerate(request_of_row.tolist()):
        if request >= 0:
            packed[row] = source[request, row - int(row_starts[request])]


def scatter_rows(packed: Tensor, row_starts: Tensor, request_of_row: Tensor, target: Tensor) -> None:
    """Writes rows back (see the package)."""
    for row, request in enumerate(request_of_row.tolist()):
        if request >= 0:
            target[request, row - int(row_starts[request])] = packed[row]
