"""How much prefill a step may carry while others decode: bounded by predicted time, in decode steps.

Chunk boundaries never change a text (results do not depend on what runs together), so they may follow measured times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_CHUNK = 8
"""Rows that are always allowed: prefill must get on, and fewer rows cost nearly as much."""


@dataclass(frozen=True)
class PrefillCosts:
    """Times of plain steps in nanoseconds, measured at start."""

    decode_ns: float
    """A step of one decode row."""
    chunk_ns: Mapping[int, float]
    """A step that is one prefill chunk at the start of a context, by rows; at least one entry."""
    context_ns: float
    """What each row costs more for each position of context before its chunk."""

    def added_ns(self, num_rows: int) -> float:
        """What prefill rows add to a step that decodes: reading the weights is paid by the decode rows.

        Piecewise linear through the measured points and 0 rows, and on with the last slope; it never falls.
        """
        points = [(0, 0.0)]
        for rows in sorted(self.chunk_ns):
            points.append((rows, max(points[-1][1], self.chunk_ns[rows] - self.decode_ns)))
        index = next((i for i in range(1, len(points)) if num_rows <= points[i][0]), len(points) - 1)
        (before, before_ns), (after, after_ns) = points[index - 1], points[index]
        return before_ns + (after_ns - before_ns) * (num_rows - before) / (after - before)

    def __str__(self) -> str:
        """In milliseconds."""
        chunks = ", ".join(f"{rows}: {ns / 1e6:.1f}" for rows, ns in sorted(self.chunk_ns.items()))
        return (
            f"decode step {self.decode_ns / 1e6:.1f} ms, prefill ms by rows {chunks}, "
            f"{self.context_ns * 1000 / 1e6:.3f} ms more a row for 1,000 positions before it"
        )


@dataclass(frozen=True)
class PrefillLimit:
    """The bound: `max_decode_steps` times the cost of a one-row decode step."""

    costs: PrefillCosts
    max_decode_steps: float

    def max_rows(self, wanted: int, start: int, num_before: int, context_ns_before: float) -> int:
        """Most rows, at most `wanted`, of a chunk at position `start`, behind other chunks of the same step: those have
        `num_before` rows and cost `context_ns_before` for their contexts. At least MIN_CHUNK if it is the first chunk.
        """
        allowed_ns = self.max_decode_steps * self.costs.decode_ns - context_ns_before

        def fits(rows: int) -> bool:
            return self.costs.added_ns(num_before + rows) + self.context_ns(rows, start) <= allowed_ns

        low, high = 0, wanted  # the cost never falls with rows
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low if num_before else max(low, min(wanted, MIN_CHUNK))

    def context_ns(self, num_rows: int, start: int) -> float:
        """What the context before a chunk adds to it."""
        return num_rows * start * self.costs.context_ns
