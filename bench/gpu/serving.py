"""Throughput of both executors and a scheduler in this process: no sockets, no other processes, no HTTP.

Both executors take turns on one engine, as they do on one card. The scheduler's Python shares this process's lock with
theirs, which four processes do not: what is measured here is a lower bound for them at small steps.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import drafter_service.server
import verifier_service.server
from drafter_service.settings import DrafterSettings
from scheduler_service.ledger import Ledger
from scheduler_service.request import Event, GenerateSpec, SamplingOptions, Summary
from scheduler_service.service import Scheduler
from scheduler_service.settings import SchedulerSettings
from scheduler_service.startup import build_scheduler
from scheduler_service.transport import InProcessTransport
from service_kit.engine_thread import EngineThread
from verifier_service.settings import VerifierSettings

_TIMEOUT_S = 60.0
_ids = itertools.count()


class Executors:
    """A target and its drafter, loaded once for many sessions."""

    def __init__(self, target: Path, drafter: Path, **both: Any) -> None:
        """`both`: settings of verifier and drafter."""
        self._thread = EngineThread("bench-engine")
        self._verifier = verifier_service.server.load_servicer(
            VerifierSettings(model=str(target), **both), self._thread
        )
        settings = DrafterSettings(model=str(drafter), target=str(target), calibration="none", **both)
        self._drafter = drafter_service.server.load_servicer(settings, self._thread)

    @contextmanager
    def scheduler(self, **settings: Any) -> Iterator[Scheduler]:
        """A session over both executors."""
        built = SchedulerSettings(max_prefill_decode_steps=0, prefix_cache="off", **settings)
        drafter = None if built.verify_mode == "off" else InProcessTransport(self._drafter)
        scheduler = build_scheduler(built, InProcessTransport(self._verifier), drafter)
        try:
            yield scheduler
        finally:
            scheduler.stop()

    def close(self) -> None:
        """Ends the last session and the engine."""
        for servicer in (self._verifier, self._drafter):
            servicer.close()
        self._thread.stop()


@dataclass
class _Answer:
    """What has come of a request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Summary):
            self.error = event.error
            self.ended.set()
        else:
            self.token_ids.extend(event.token_ids)


class Rates(NamedTuple):
    """Of the steps within a time."""

    tokens_per_second: float
    """All requests together."""
    tokens_per_step: float
    """That a row commits in a step."""
    verified_per_step: float
    """Drafts that a row verifies in a step."""
    step_ms: float

    @classmethod
    def between(cls, before: Ledger, after: Ledger, seconds: float) -> Rates:
        """Of what was done between two states."""

        def grown(name: str) -> int:
            return int(getattr(after, name) - getattr(before, name))

        rows = max(1, grown("num_verify_rows"))
        return cls(
            grown("num_committed") / seconds,
            1 + grown("num_accepted") / rows,
            grown("num_verified") / rows,
            1e3 * seconds / max(1, grown("num_steps")),
        )


def steady_rates(scheduler: Scheduler, prompts: Sequence[Sequence[int]], seconds: float, min_steps: int) -> Rates:
    """Rates over so many seconds while all `prompts` are answered at once, beginning as long after the last prompt, so
    that the scheduler has settled on what to draft.

    They sample without a seed at temperature 1, so that drafts are accepted by rejection sampling. Raises RuntimeError
    if a request fails or ends before the time is over (max_model_len is too short).
    """
    answers = _submit(scheduler, prompts, SamplingOptions(temperature=1.0), None)
    _wait_until(lambda: all(answer.token_ids for answer in answers), answers)
    _wait_steps(scheduler, answers, seconds, 2)
    before, started = scheduler.load().ledger, time.monotonic()
    _wait_steps(scheduler, answers, seconds, min_steps)
    after, ended = scheduler.load().ledger, time.monotonic()
    for answer in answers:
        scheduler.abort(answer.request_id)
    for answer in answers:
        answer.ended.wait(_TIMEOUT_S)
    return Rates.between(before, after, ended - started)


def answer_all(
    scheduler: Scheduler, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[Rates, list[list[int]]]:
    """Rates and greedy texts of all prompts at once, to the end of the last."""
    before, started = scheduler.load().ledger, time.monotonic()
    answers = _submit(scheduler, prompts, SamplingOptions(temperature=0.0), max_tokens)
    for answer in answers:
        if not answer.ended.wait(_TIMEOUT_S) or answer.error:
            raise RuntimeError(answer.error or f"a request did not end in {_TIMEOUT_S:.0f} s")
    return (
        Rates.between(before, scheduler.load().ledger, time.monotonic() - started),
        [answer.token_ids for answer in answers],
    )


def _submit(
    scheduler: Scheduler, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, max_tokens: int | None
) -> list[_Answer]:
    answers = []
    for prompt in prompts:
        answer = _Answer(f"bench-{next(_ids)}")
        spec = GenerateSpec(answer.request_id, list(prompt), sampling, max_tokens, ignore_eos=max_tokens is None)
        scheduler.submit(spec, answer)
        answers.append(answer)
    return answers


def _wait_steps(scheduler: Scheduler, answers: Sequence[_Answer], seconds: float, num_steps: int) -> None:
    """Returns after so many seconds and steps."""
    started, first = time.monotonic(), scheduler.load().ledger.num_steps
    _wait_until(
        lambda: time.monotonic() >= started + seconds and scheduler.load().ledger.num_steps >= first + num_steps,
        answers,
    )


def _wait_until(is_done: Callable[[], bool], answers: Sequence[_Answer]) -> None:
    """Raises RuntimeError if an answer ends meanwhile, or if it takes more than a minute."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_done():
        if ended := [answer for answer in answers if answer.ended.is_set()]:
            raise RuntimeError(ended[0].error or "a request came to its end: raise max_model_len")
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing to measure after {_TIMEOUT_S:.0f} s")
        time.sleep(0.002)
