"""Verify lengths that the verifier chooses by itself, through a whole engine on the golden models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.rig import Stream, running
from in_process import Executors

from kernels.survivals import corrected
from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_file import StoredCosts
from scheduler_service.cost_model_start import CostSource
from scheduler_service.policy.survival import admission_order, lens_of, survivals, usable_lens
from scheduler_service.prefill_limit import PrefillCosts
from scheduler_service.request import GenerateSpec, SamplingOptions
from scheduler_service.service import Scheduler
from service_kit.errors import ConfigurationError

COSTS = StoredCosts(
    CostModel(4e6, 2e5, 40.0, np.repeat(np.arange(13) * 4e5, 5), {7: np.arange(9) * 1e6}),
    PrefillCosts(1e6, {1: 1e6}, 0.0),
)
REQUESTS = (
    SamplingOptions(temperature=0.0),
    SamplingOptions(temperature=1.5, seed=7, top_p=0.9),
    SamplingOptions(temperature=0.8, seed=2, top_k=20),
    SamplingOptions(temperature=2.0),
)
NUM_INVARIANT, NUM_TOKENS = 3, 16


class Recorded:
    """Executors whose step calls are written down."""

    def __init__(self, executors: Executors, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: dict[int, tuple[Any, Any]] = {}
        self.steps: list[tuple[Any, Any]] = []
        self._has_step = threading.Condition()
        self._step_ids: set[int] = set()
        draft, step = executors.drafters[0].Draft, executors.verifier.Step

        def recording_draft(request: Any, context: Any = None) -> Any:
            with self._has_step:  # a Step that settles lengths is sent without the answer to this
                is_here = self._has_step.wait_for(
                    lambda: not request.publishes_blocks or request.step_id in self._step_ids, timeout=20
                )
            assert is_here
            self.drafts[request.step_id] = (request, draft(request, context))
            return self.drafts[request.step_id][1]

        def recording_step(request: Any, context: Any = None) -> Any:
            with self._has_step:
                self._step_ids.add(request.step_id)
                self._has_step.notify_all()
            answer = step(request, context)
            self.steps.append((request, answer))
            return answer

        monkeypatch.setattr(executors.drafters[0], "Draft", recording_draft)
        monkeypatch.setattr(executors.verifier, "Step", recording_step)

    def settled(self) -> list[tuple[Any, Any]]:
        return [each for each in self.steps if each[0].block_rows]

    def host_lens(self, request: Any) -> list[int]:
        """What the scheduler's own rule makes of the drafter's answer."""
        asked, answer = self.drafts[request.step_id]
        shape = len(asked.row_slots), asked.num_draft_tokens
        confidences = np.frombuffer(answer.confidences, "<f4").reshape(shape)
        confidences = corrected(confidences, np.frombuffer(asked.confidence_odds, "<f8").reshape(shape))
        assert [request.row_slots[row] for row in request.block_rows] == list(asked.row_slots)
        usable = usable_lens(confidences, list(request.block_max_drafts)).lens
        gains = survivals(confidences, usable) * np.array(request.block_weights)[:, None]
        return lens_of(admission_order(gains).rows[: request.verify_budget], shape[0]).tolist()


@pytest.fixture(scope="module")
def executors() -> Iterator[Executors]:
    executors = Executors()
    yield executors
    executors.close()


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostSource, "obtain", lambda *_: COSTS)


def run(scheduler: Scheduler, requests: Sequence[SamplingOptions] = REQUESTS) -> list[list[int]]:
    streams = [Stream() for _ in requests]
    for index, (options, stream) in enumerate(zip(requests, streams, strict=True)):
        prompt = [(7 * index + 11 * place) % 512 for place in range(3 + 2 * index)]
        spec = GenerateSpec(f"r{index}", prompt, options, NUM_TOKENS, priority=1.0 + index % 2)
        scheduler.submit(spec, stream)
    assert [stream.wait().error for stream in streams] == [""] * len(requests)
    return [stream.text() for stream in streams]


@pytest.mark.parametrize("rule", ["lagged", "adaptive"])
def test_texts_and_lengths_are_those_of_the_rule(
    executors: Executors, rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with executors.scheduler("off") as scheduler:
        expected = run(scheduler)
    recorded, trace = Recorded(executors, monkeypatch), tmp_path / "rounds.jsonl"
    options = {"lossless_rule": rule, "audit_share": 0.1, "trace_rounds": trace, "verify_lens_on_device": True}
    with executors.scheduler("compact", max_batch_tokens=40, **options) as scheduler:
        found = run(scheduler)
        load = scheduler.load()
    assert found[:NUM_INVARIANT] == expected[:NUM_INVARIANT]
    assert [len(text) for text in found] == [NUM_TOKENS] * len(REQUESTS)

    settled = recorded.settled()
    assert len(settled) > 2
    for request, answer in settled:
        lens = [answer.verify_lens[row] for row in request.block_rows]
        assert lens == recorded.host_lens(request)
        assert sum(answer.verify_lens) == sum(lens) <= request.verify_budget
        assert not request.prob_rows
    assert load.ledger.num_verified == sum(sum(answer.verify_lens) for _, answer in recorded.steps)
    assert load.ledger.num_accepted == sum(sum(answer.accepted_lens) for _, answer in recorded.steps)
    assert load.ledger.num_audited_rounds > 0
    assert load.ledger.num_blocks > 0
    lines = {line["step_id"]: line for line in map(json.loads, trace.read_text().splitlines())}
    for request, answer in settled:
        rounds = lines[request.step_id]["rounds"]
        assert sum(each["verify_len"] for each in rounds) == sum(answer.verify_lens)
        assert [each["is_audit"] for each in rounds] == [False] * len(rounds)
    if rule == "lagged":  # all that was drafted was settled, but for audits
        usual = recorded.drafts.keys() - {request.step_id for request, _ in settled}
        audited = {step_id for step_id, line in lines.items() if any(each["is_audit"] for each in line["rounds"])}
        assert {step_id for step_id in usual if recorded.drafts[step_id][0].row_slots} <= audited


def test_a_lost_context_costs_its_row_the_window(executors: Executors, monkeypatch: pytest.MonkeyPatch) -> None:
    with executors.scheduler("off") as scheduler:
        expected = run(scheduler)
    recorded = Recorded(executors, monkeypatch)
    draft = executors.drafters[0].Draft

    def losing(request: Any, context: Any = None) -> Any:
        if request.publishes_blocks and 0 in request.ingest_slots and not lost:
            lost.append(request.step_id)
            request.ingest_newest_step_ids[list(request.ingest_slots).index(0)] = 0
        return draft(request, context)

    lost: list[int] = []
    monkeypatch.setattr(executors.drafters[0], "Draft", losing)
    options = {"lossless_rule": "lagged", "audit_share": 0.0, "verify_lens_on_device": True}
    with executors.scheduler("compact", max_batch_tokens=40, **options) as scheduler:
        assert run(scheduler)[:NUM_INVARIANT] == expected[:NUM_INVARIANT]
    ((request, answer),) = [each for each in recorded.settled() if each[0].step_id == lost[0]]
    assert recorded.drafts[lost[0]][1].ingest_failures
    lens = dict(zip(request.row_slots, answer.verify_lens, strict=True))
    assert lens[0] == 0
    assert not any(0 in asked.row_slots for step_id, (asked, _) in recorded.drafts.items() if step_id > lost[0])


def test_rows_with_more_than_drafts_take_the_usual_way(executors: Executors, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(executors, monkeypatch)
    options = {"lossless_rule": "lagged", "audit_share": 0.0, "verify_lens_on_device": True}
    with executors.scheduler("compact", max_batch_tokens=40, **options) as scheduler:
        run(scheduler, [SamplingOptions(temperature=0.0, frequency_penalty=0.5)])
    assert any(asked.row_slots for asked, _ in recorded.drafts.values())
    assert recorded.settled() == []


def test_services_that_cannot_are_named() -> None:
    with pytest.raises(ConfigurationError, match="the verifier cannot"), running("compact", verify_lens_on_device=True):
        pass
    with running("static", verify_lens_on_device=True):
        pass
