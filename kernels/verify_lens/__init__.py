"""Verify lengths of a step from current survivals and a budget that older confidences gave (design 5.1, "lagged").

The drafts of all rows are ranked by survival, highest first, then position, then row, both lowest first; those that
survive with probability 0 (or NaN) are left out. A row's verify length is how many of its drafts are among the first K.
Survivals never rise along a row, so those are its first ones.

`verify_lens(survivals, limits, budget, lens)` in `reference.py`, `cpu.py`, `triton.py`, into `lens`: survivals [R, G]
float32 or float64, times the row's weight where rows have one; limits [R] int32, the most drafts of each row, -1 for a
row of nobody, whose entry is left alone; budget [1] int32 or int64; lens [R] int32. On a device no value is read on the
host, so the lengths go from a drafter's survivals to a verifier's step without one.
"""
