"""Executors that answer at once, for timing what the scheduler does around them: bytes in, bytes out, no model."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from dspark.v1 import drafter_pb2, types_pb2, verifier_pb2

_FIRST_TOKEN = 10
"""Above every special token."""


class Waits:
    """Time of the calling thread while a call is on its way: a real executor is at work then, and nobody waits."""

    def __init__(self) -> None:
        self._num_calls = self._ended_ns = self._began_ns = 0
        self.own_ns = 0
        """Time spent on making up answers, which a real executor would not take from this thread."""

    @property
    def total_ns(self) -> int:
        """So far."""
        return self._ended_ns + (time.thread_time_ns() - self._began_ns if self._num_calls else 0)

    def begin(self) -> None:
        """A call was sent."""
        if not self._num_calls:
            self._began_ns = time.thread_time_ns()
        self._num_calls += 1

    def leave_out(self, own_ns: int) -> None:
        """An answer was made up."""
        self.own_ns += own_ns
        self._began_ns += own_ns

    def end(self) -> None:
        """The answer is wanted."""
        total_ns = self.total_ns
        self._num_calls -= 1
        if not self._num_calls:
            self._ended_ns = total_ns


class InstantTransport:
    """A transport to one executor. Requests are turned into bytes and answers made from bytes, as over a socket."""

    def __init__(self, answer: Any, response: Any, waits: Waits) -> None:
        self._answer, self._response, self._waits = answer, response, waits
        self._waiting: deque[bytes] = deque()

    def exchange(self, name: str) -> InstantTransport:
        """Itself."""
        return self

    def send(self, request: Any, timeout_s: float, metadata: Any) -> None:
        """See `transport.Exchange`."""
        sent = request.SerializeToString()
        started = time.thread_time_ns()
        self._waiting.append(self._answer(type(request).FromString(sent)).SerializeToString())
        self._waits.leave_out(time.thread_time_ns() - started)
        self._waits.begin()

    def receive(self, timeout_s: float) -> Any:
        """See `transport.Exchange`."""
        self._waits.end()
        return self._response.FromString(self._waiting.popleft())


class InstantVerifier:
    """Accepts a random part of each window."""

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def __call__(self, request: Any) -> Any:
        """The answer to a step."""
        drafts = np.array(request.row_num_drafts, np.int64)
        accepted = self._dice.integers(0, drafts + 1)
        emits = np.array(request.row_emits, np.int64)
        token_ids = self._dice.integers(_FIRST_TOKEN, 40_000, int(((accepted + 1) * emits).sum()))
        return verifier_pb2.StepResponse(
            verify_lens=drafts.tolist(),
            accepted_lens=accepted.tolist(),
            token_ids=token_ids.tolist(),
            target_probs=np.full(len(request.prob_rows), 0.5, "<f4").tobytes(),
            timings=[types_pb2.PhaseTiming(phase=name, duration_ns=1000) for name in ("forward", "head", "accept")],
        )


class InstantDrafter:
    """Drafts random tokens with confidences of all sizes."""

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)

    def __call__(self, request: Any) -> Any:
        """The answer to a draft call."""
        count = len(request.row_slots) * request.num_draft_tokens
        return drafter_pb2.DraftResponse(
            token_ids=self._dice.integers(_FIRST_TOKEN, 40_000, count).tolist(),
            confidences=self._dice.uniform(0.5, 1.0, count).astype("<f4").tobytes(),
            draft_probs=self._dice.uniform(0.1, 1.0, count).astype("<f4").tobytes(),
            timings=[types_pb2.PhaseTiming(phase=name, duration_ns=1000) for name in ("ingest", "backbone", "head")],
        )
