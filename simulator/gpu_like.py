"""Makes `tables/gpu-like.json`: a target on a data-centre GPU as a cost table, made up from public numbers.

    python -m simulator.gpu_like > simulator/tables/gpu-like.json

A pass over M token rows takes as long as reading the weights or as the multiplications, whichever is longer, at the
next larger captured size: flat while memory decides, then steep, in steps.
"""

from __future__ import annotations

import json

_ORIGIN = {
    "what": "made up: H100-like, an 8B dense target in bf16 with a DSpark drafter of 5 layers; nothing is measured",
    "memory": "3.35 TB/s by the vendor's data sheet, of which 80 % are reached: 2.7e12 bytes/s",
    "arithmetic": "990e12 dense bf16 operations/s by the vendor's data sheet, of which 60 % are reached: 594e12",
    "target pass": "8e9 weights of 2 bytes are read in 5.9 ms; 2 x 8e9 operations a token row take 26.9 us; 3 us a "
    "token row for logits and acceptance",
    "bias": "0.5 ms a step for host and launches: a guess",
    "row": "23 us a request: bf16 K/V of 375 positions, the mean of the synthetic requests (147 kB each: 36 layers, "
    "8 heads of 128), is read in 20 us; the host takes 3 us: a guess",
    "context": "0.9 ns a position read by a token row: 4 x 4,096 x 32 operations; reading K/V is in the row",
    "draft pass": "1.7e9 weights (5 layers, lm_head) are read in 1.26 ms; 2 x 1.7e9 operations a slot take 5.7 us; "
    "25 us for each position of the sequential head; 0.2 ms for host and launches: a guess",
    "tiers": "token rows are padded to the next captured size; the sizes are a guess at what engines capture",
}
_BYTES_S, _OPERATIONS_S = 2.7e12, 594e12
_TARGET, _DRAFTER = 8e9, 1.7e9
_BLOCKS = (3, 5, 7)
_MAX_ROWS = 1024


def _tiers() -> list[int]:
    """Captured numbers of token rows."""
    sizes, size = [1, 2, 4, 8], 8
    while size < _MAX_ROWS * (_BLOCKS[-1] + 1):
        size += max(8, 1 << (size.bit_length() - 3))  # an eighth to a quarter more
        sizes.append(size)
    return sizes


def _pass_ns(num_weights: float, num_tokens: int) -> float:
    """Weights read once, or multiplied with every token row."""
    return 1e9 * max(2 * num_weights / _BYTES_S, 2 * num_weights * num_tokens / _OPERATIONS_S)


def _draft_ns(num_rows: int, block_len: int) -> float:
    if num_rows == 0:
        return 0.0
    padded = next(size for size in _tiers() if size >= num_rows * block_len)
    return 0.2e6 + _pass_ns(_DRAFTER, padded) + 25e3 * block_len


def gpu_like_table() -> dict[str, object]:
    """The file's content."""
    tiers = _tiers()
    rows = [0, *(size for size in tiers if size <= _MAX_ROWS)]
    return {
        "format": 1,
        "origin": _ORIGIN,
        "model": {
            "bias_ns": 0.5e6,
            "row_ns": 23e3,
            "context_ns": 0.9,
            "token_ns": {"at": [0, *tiers], "ns": [0, *(round(_pass_ns(_TARGET, n) + 3e3 * n) for n in tiers)]},
            "block_draft_ns": {
                str(length): {"at": rows, "ns": [round(_draft_ns(n, length)) for n in rows]} for length in _BLOCKS
            },
        },
    }


if __name__ == "__main__":
    print(json.dumps(gpu_like_table(), indent=1))
