"""What a step costs: T = bias + α·R + δ(D, block) + θ(M) + κ·C, in nanoseconds (design 6).

R rows, D drafted rows and the length of their blocks, M token rows, C positions of context that those read. θ and δ are
monotone and no term is negative: a noisy measurement can make no work look cheaper than less of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_service.policy.base import StepWork
from service_kit.errors import ConfigurationError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """The terms, measured or made up; implements `policy.StepCosts`.

    Raises ConfigurationError, naming the term, for one that is negative, no number or not monotone.
    """

    bias_ns: float
    """What every step costs; the fit counts a single token row's θ here."""
    row_ns: float
    """Each row: alpha."""
    context_ns: float
    """Each position of context read: κ."""
    token_ns: Floats
    """[max tokens + 1] θ by token rows as they are asked for; padding is already in it. Beyond it: see `extended`."""
    block_draft_ns: Mapping[int, Floats]
    """Block length to [max drafted rows + 1] δ, 0 for no rows; empty when there is no drafter."""

    def __post_init__(self) -> None:
        for name in ("bias_ns", "row_ns", "context_ns"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigurationError(f"cost model: {name} is {value}, not a time: measure again (dspark profile)")
        if self.bias_ns + self.row_ns <= 0:
            raise ConfigurationError("cost model: bias_ns and row_ns are both 0, no step is free: measure again")
        _check_curve("token_ns", self.token_ns)
        before: Floats | None = None
        for block_len, curve in sorted(self.block_draft_ns.items()):
            name = f"block_draft_ns of block length {block_len}"
            _check_curve(name, curve)
            if block_len < 1 or curve[0] != 0:
                raise ConfigurationError(f"cost model: {name} must be of at least 1 draft and cost 0 for no rows")
            if before is not None and (before.size != curve.size or (before > curve).any()):
                raise ConfigurationError(
                    f"cost model: {name} must have as many entries as that of shorter blocks, and none that is less"
                )
            before = curve

    def total_ns(self, work: StepWork, contexts: Floats) -> Floats:
        """See `policy.StepCosts`."""
        draft_ns = self.draft_ns(work.num_drafted, work.block_len)
        return draft_ns + self.step_ns(work, contexts)

    def step_ns(self, work: StepWork, contexts: Floats) -> Floats:
        """`total_ns` without δ: [n + 1] with the first 0, 1 … n drafts verified."""
        read = work.num_context + np.concatenate(([0.0], np.cumsum(contexts)))
        tokens = extended(self.token_ns, work.num_tokens, contexts.size)
        return self.bias_ns + self.row_ns * work.num_rows + tokens + self.context_ns * read

    def plain_ns(self, num_rows: int, num_tokens: int, num_context: float) -> float:
        """The same step without drafting."""
        token_ns = float(extended(self.token_ns, num_tokens, 0)[0])
        return self.bias_ns + self.row_ns * num_rows + token_ns + self.context_ns * num_context

    def draft_ns(self, num_drafted: int, block_len: int = 0) -> float:
        """δ. The drafter runs the next longer block it has; 0, and more than the longest: the longest."""
        if not num_drafted or not self.block_draft_ns:
            return 0.0
        return float(extended(self.block_draft_ns[self.block_of(block_len)], num_drafted, 0)[0])

    def block_of(self, block_len: int) -> int:
        """The measured block that stands for `block_len`. Raises ValueError if no block was measured."""
        longest = max(self.block_draft_ns)
        return min((length for length in self.block_draft_ns if length >= block_len > 0), default=longest)

    def __str__(self) -> str:
        """The terms in milliseconds, the curves at a few sizes."""
        curves = {"θ by token rows": self.token_ns}
        curves |= {f"δ by rows of {length} drafts": curve for length, curve in sorted(self.block_draft_ns.items())}
        return (
            f"ms: bias {self.bias_ns / 1e6:.2f}, a row {self.row_ns / 1e6:.3f}, 1,000 positions of context "
            f"{self.context_ns / 1e3:.3f}; "
        ) + "; ".join(
            f"{name} " + ", ".join(f"{n}: {curve[n] / 1e6:.2f}" for n in shown_sizes(curve.size - 1))
            for name, curve in curves.items()
        )


def extended(curve: Floats, first: int, count: int) -> Floats:
    """[count + 1] entries from `first`; beyond the curve's end it goes on with the slope of its upper half.

    Not with the last slope: that may be of two equal neighbours, and more would seem to be free.
    """
    last = curve.size - 1
    if first + count <= last:
        return curve[first : first + count + 1]
    at = np.arange(first, first + count + 1)
    half = last // 2
    slope = (curve[last] - curve[half]) / max(1, last - half)
    result: Floats = curve[np.minimum(at, last)] + slope * np.maximum(0, at - last)
    return result


def shown_sizes(largest: int) -> list[int]:
    """Sizes at which curves are measured, corrected and printed: dense where steps are small, up to `largest`."""
    small = [n for n in (1, 2, 3, 4, 5, 6, 8, 12) if n <= largest]
    return small + [
        n for power in range(4, largest.bit_length() + 1) for n in (2**power, 3 * 2 ** (power - 1)) if n <= largest
    ]


def _check_curve(name: str, curve: Floats) -> None:
    if curve.ndim != 1 or curve.size < 2:
        raise ConfigurationError(f"cost model: {name} needs at least the entries for 0 and 1")
    if not (np.isfinite(curve).all() and (curve >= 0).all()):
        index = int(np.flatnonzero(~(np.isfinite(curve) & (curve >= 0)))[0])
        raise ConfigurationError(f"cost model: {name}[{index}] is {curve[index]}, not a time: measure again")
    if (falls := np.flatnonzero(np.diff(curve) < 0)).size:
        index = int(falls[0])
        raise ConfigurationError(
            f"cost model: {name} falls from {curve[index]:.0f} at {index} to {curve[index + 1]:.0f} at {index + 1}, "
            "more work cannot cost less: measure again"
        )
