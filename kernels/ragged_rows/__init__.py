"""Rows of different lengths packed to the front of one batch, and back to the places of their requests.

Request r has row_lens[r] rows (0 and less: none). Packed, they follow each other in request order: those of request r
begin at row_starts[r]; what is left of the M packed rows (a tier's padding) belongs to nobody.

In `reference.py` and `triton.py`; every result is written into a tensor that the caller gives, and nothing is written
for nobody:

- `index_rows(row_lens, row_starts, request_of_row)`: row_lens [R], row_starts [R] and request_of_row [M] int32, the
  latter -1 for rows of nobody; rows beyond M are dropped;
- `pack_rows(source, row_starts, request_of_row, packed)`: packed[row] = source[request, row - row_starts[request]] with
  source [R, W, ...] and packed [M, ...] of any dtype, alike and contiguous;
- `scatter_rows(packed, row_starts, request_of_row, target)`: the way back, target [R, W, ...].

No request may have more than W rows.
"""
