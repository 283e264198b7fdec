"""A whole scheduler over the fake executors, for tests."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fakes.executors import FakeDrafter, FakeVerifier, StepGate, fake_pair

from kernels.sampling import Regime, SlotSampling
from scheduler_service.request import Event, GenerateSpec, Request, SamplingOptions, Summary, TokenChunk
from scheduler_service.service import Scheduler
from scheduler_service.settings import SchedulerSettings
from scheduler_service.startup import build_scheduler
from scheduler_service.transport import InProcessTransport

GREEDY = SlotSampling(Regime.GREEDY)
_ids = itertools.count()


@dataclass
class Stream:
    """Collects the events of one request."""

    chunks: list[TokenChunk] = field(default_factory=list)
    summary: Summary | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    first_chunk: threading.Event = field(default_factory=threading.Event)
    request: Request | None = None

    def __call__(self, event: Event) -> None:
        assert self.summary is None, "an event after the summary"
        if isinstance(event, Summary):
            self.summary = event
            self.ended.set()
        else:
            self.chunks.append(event)
            self.first_chunk.set()

    def wait(self) -> Summary:
        """The summary; fails the test if it does not come."""
        assert self.ended.wait(20), "the request did not end"
        assert self.summary is not None
        return self.summary

    def text(self, choice: int = 0) -> list[int]:
        """Tokens of a choice, once all have ended."""
        self.wait()
        return [token for chunk in self.chunks if chunk.choice == choice for token in chunk.token_ids]


@dataclass
class Rig:
    """A running scheduler and the fakes behind it."""

    scheduler: Scheduler
    verifier: FakeVerifier
    drafter: FakeDrafter

    def submit(self, prompt: list[int], max_tokens: int | None = 8, **spec: Any) -> Stream:
        """Submits a greedy request unless told otherwise."""
        stream = Stream()
        spec.setdefault("sampling", SamplingOptions(temperature=0.0))
        spec.setdefault("request_id", f"r{next(_ids)}")
        stream.request = self.scheduler.submit(GenerateSpec(prompt=prompt, max_tokens=max_tokens, **spec), stream)
        return stream

    def submit_all(self, prompts: list[list[int]], max_tokens: int | None = 8, **spec: Any) -> list[Stream]:
        """Submits several requests at once: the first step sees all of them."""
        self.verifier.gate = StepGate()
        streams = [self.submit(prompt, max_tokens, **spec) for prompt in prompts]
        self.verifier.gate.open()
        return streams

    def wait_until_idle(self) -> None:
        """Returns when every slot and page is free; fails the test if that does not come.

        After a summary the drafter may still ingest what the answer left behind.
        """
        deadline = time.monotonic() + 20
        while True:
            load = self.scheduler.load()
            found = (load.num_running, load.num_waiting, load.num_free_slots, load.num_free_pages)
            if found == (0, 0, load.num_slots, load.num_pages):
                return
            assert time.monotonic() < deadline, f"not idle: {load}"
            time.sleep(0.001)


@contextmanager
def running(
    mode: str = "static",
    pair: tuple[FakeVerifier, FakeDrafter] | None = None,
    *,
    is_failing: bool = False,
    **settings: Any,
) -> Iterator[Rig]:
    """A scheduler that is stopped at the end, after its integrity was checked (unless its loop is meant to fail)."""
    verifier, drafter = pair or fake_pair()
    values = {"verify_mode": mode, "max_num_seqs": 4, "max_batch_tokens": 48, "kv_memory": 96_000, **settings}
    values.setdefault("guard", False)  # whether drafting pays is no matter of the fakes' times
    values.setdefault("max_prefill_decode_steps", 0)  # no calls before the first request
    scheduler = build_scheduler(
        SchedulerSettings(**values),
        InProcessTransport(verifier),
        None if mode == "off" else InProcessTransport(drafter),
    )
    try:
        yield Rig(scheduler, verifier, drafter)
        if not is_failing:
            scheduler.check_integrity()
            assert not scheduler.failure, scheduler.failure
    finally:
        if verifier.gate is not None:
            verifier.gate.open()
        scheduler.stop()
