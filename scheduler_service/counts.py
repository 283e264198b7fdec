"""What is counted for metrics alone: distributions over ended choices, and over the windows of drafted steps.

Written by the step thread, a few additions a choice or step; read by whoever exports them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import get_args

from scheduler_service.request import FinishReason, OffKind, Sequence
from service_kit.metrics import Histogram

LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Buckets of request times, in seconds: those of other servers, so that their dashboards add up."""
TOKENS = tuple(float(10**power * first) for power in range(6) for first in (1, 2, 5))
"""Buckets of token counts."""
_BUDGETS = tuple(float(bound) for bound in (0, *(2**power for power in range(12))))


class ChoiceCounts:
    """Of choices that have ended; times by one clock, from submission on."""

    def __init__(self, block_size: int) -> None:
        self.num_ended = dict.fromkeys(FinishReason, 0)
        self.queue_s, self.prefill_s, self.decode_s = (Histogram(LATENCY_S) for _ in range(3))
        self.inference_s = Histogram(LATENCY_S)
        self.prompt_tokens, self.generation_tokens, self.max_tokens = (Histogram(TOKENS) for _ in range(3))
        self.num_undrafted: dict[OffKind, int] = dict.fromkeys(get_args(OffKind), 0)
        """Requests for which nothing was drafted, by kind of reason."""
        self.accepted_lens = [0] * (block_size + 1)
        """Entry k counts row-steps after the first token that committed k drafts; not of ended choices alone."""

    def end(self, sequence: Sequence) -> None:
        """A choice has ended; its slot may be gone already."""
        assert sequence.finish_reason is not None
        self.num_ended[sequence.finish_reason] += 1
        self.prompt_tokens.observe(len(sequence.request.prompt))
        self.generation_tokens.observe(sequence.num_tokens)
        self.max_tokens.observe(sequence.request.max_tokens)
        if not sequence.admitted_ns:
            return
        ended_ns = time.monotonic_ns()
        self.queue_s.observe(sequence.admitted_ns / 1e9 - sequence.request.arrived_s)
        self.inference_s.observe((ended_ns - sequence.admitted_ns) / 1e9)
        if sequence.first_token_ns:
            self.prefill_s.observe((sequence.first_token_ns - sequence.admitted_ns) / 1e9)
            self.decode_s.observe((ended_ns - sequence.first_token_ns) / 1e9)

    def count_undrafted(self, kind: OffKind) -> None:
        """A request has ended for which nothing was drafted."""
        self.num_undrafted[kind] += 1


class WindowCounts:
    """Of steps that drafted."""

    def __init__(self, block_size: int) -> None:
        self.by_len = [0] * (block_size + 1)
        """Entry l counts drafted rows of which l drafts were verified."""
        self.budgets = Histogram(_BUDGETS)
        """Drafts verified in a step, over all rows."""

    def add(self, verify_lens: Seq[int]) -> None:
        """The windows of a step."""
        for verify_len in verify_lens:  # lists count such small numbers faster than arrays
            self.by_len[verify_len] += 1
        self.budgets.observe(sum(verify_lens))
