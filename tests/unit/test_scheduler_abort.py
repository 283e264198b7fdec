"""Requests that end at any point of a step, whoever asks: nothing leaks, nobody else's text changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fakes.executors import FakeDrafter, FakeVerifier, Ring, reference_text
from fakes.rig import GREEDY, Stream, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.philox import derive_key
from kernels.sampling import Regime, SlotSampling
from scheduler_service.request import Event, FinishReason, GenerateSpec, SamplingOptions
from service_kit.errors import UnavailableError

PROMPTS = [[1 + (11 * i + 5 * j) % 49 for j in range(1 + (9 * i) % 23)] for i in range(6)]
SAMPLINGS = [(SamplingOptions(temperature=0.0), SamplingOptions(seed=i), SamplingOptions())[i % 3] for i in range(6)]
NUM_TOKENS = 18


class End(NamedTuple):
    """A request's end: when the `index`-th call or event passes `point`."""

    point: str
    index: int
    request: int
    choice: int | None
    reason: FinishReason


@dataclass
class Points:
    """Runs what waits for a point when it is passed, on the thread that passes it."""

    waiting: dict[tuple[str, int], list[Callable[[], None]]] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)

    def pass_(self, point: str) -> None:
        index = next(self.counts.setdefault(point, itertools.count()))
        for action in self.waiting.pop((point, index), []):
            action()


class Verifier(FakeVerifier):
    points: Points

    def Step(self, request: Any, context: Any) -> Any:
        self.points.pass_("step sent")
        reply = super().Step(request, context)
        self.points.pass_("step run")
        return reply


class Drafter(FakeDrafter):
    points: Points

    def Draft(self, request: Any, context: Any) -> Any:
        self.points.pass_("draft sent")
        reply = super().Draft(request, context)
        self.points.pass_("drafted")
        return reply


@dataclass
class WatchedStream(Stream):
    points: Points = field(default_factory=Points)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.points.pass_("delivered")


ends = st.builds(
    End,
    st.sampled_from(("submitted", "draft sent", "drafted", "step sent", "step run", "delivered")),
    st.integers(0, 12),
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from((None, 0, 1)),
    st.sampled_from((FinishReason.ABORT, FinishReason.STOP)),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(ends, min_size=1, max_size=8),
    st.sampled_from(("off", "static", "threshold")),
    st.integers(14, 30),
    st.booleans(),
    st.sampled_from((8, 48)),
)
def test_a_request_may_end_at_any_point_of_a_step(
    planned: list[End], mode: str, num_pages: int, chains: bool, max_batch_tokens: int
) -> None:
    points, ring = Points(), Ring()
    verifier, drafter = Verifier(ring), Drafter(ring)
    verifier.points = drafter.points = points
    sizes = {"kv_memory": num_pages * (1000 if mode == "off" else 1500), "max_batch_tokens": max_batch_tokens}
    with running(mode, (verifier, drafter), chain_plain_steps=chains, **sizes) as rig:

        def ending(end: End) -> Callable[[], None]:
            def act() -> None:
                rig.scheduler.abort(f"r{end.request}", end.choice, end.reason)
                with suppress(UnavailableError):
                    rig.scheduler._loop.post(rig.scheduler._batch.check_integrity)  # a failure ends the loop

            return act

        for end in planned:
            points.waiting.setdefault((end.point, end.index), []).append(ending(end))
        streams = []
        for index, prompt in enumerate(PROMPTS):
            stream = WatchedStream(points=points)
            spec = GenerateSpec(
                f"r{index}", prompt, SAMPLINGS[index], NUM_TOKENS, num_choices=2 if index in (1, 3) else 1
            )
            stream.request = rig.scheduler.submit(spec, stream)
            streams.append(stream)
            points.pass_("submitted")
        ended = {end.request for end in planned}
        for index, stream in enumerate(streams):
            summary = stream.wait()
            assert not summary.error
            for choice, whole in enumerate(summary.choices):
                if index not in ended:
                    assert (whole.finish_reason, whole.num_tokens) == (FinishReason.LENGTH, NUM_TOKENS)
                text = stream.text(choice)
                assert len(text) == whole.num_tokens
                if index % 3 < 2:
                    slot = SlotSampling(Regime.COUPLED, key=derive_key(index, choice)) if index % 3 else GREEDY
                    assert text == reference_text(PROMPTS[index], len(text), slot)
        rig.wait_until_idle()
        assert rig.scheduler.load().ledger.num_open_blocks <= rig.scheduler.load().ledger.num_blocks
