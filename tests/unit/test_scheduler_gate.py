"""The draft gate at work: steps without drafts are chained, features wait for it, blocks are as long as it says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from fakes.executors import StepGate, fake_pair, reference_text
from fakes.rig import GREEDY, Rig, running

from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, OpenGate, StepShape
from scheduler_service.draft_history import DraftedRounds
from scheduler_service.guard import Guard
from service_kit.errors import ConfigurationError


class ScriptedGate(OpenGate):
    """Drafts `num_slots` of every candidate where the script says so, by the context length of the first."""

    def __init__(self, drafts: Callable[[int], bool], num_slots: int = 3) -> None:
        super().__init__(num_slots)
        self._drafts = drafts
        self.rounds: list[DraftedRounds] = []
        self.num_plain = self.num_steady = self.num_disturbed = 0

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        if not candidates.num_rows or not self._drafts(int(candidates.context_lens[0])):
            return NOTHING
        return DraftDecision(list(range(candidates.num_rows))[::-1], self._num_slots, gain_ns=10.0)

    def observe_plain(self, shape: StepShape, elapsed_ns: int, *, is_steady: bool, is_disturbed: bool) -> float:
        assert elapsed_ns > 0
        self.num_plain += 1
        self.num_steady += is_steady
        self.num_disturbed += is_disturbed
        return 0.0

    def observe_drafted(
        self,
        shape: StepShape,
        decision: DraftDecision,
        rounds: DraftedRounds,
        elapsed_ns: int,
        *,
        is_steady: bool,
    ) -> float:
        self.rounds.append(rounds)
        self.num_steady += is_steady
        return -7.0

    @property
    def off_reason(self) -> str:
        return "scripted"


def _scripted(rig: Rig, gate: ScriptedGate) -> ScriptedGate:
    rig.scheduler._batch.draft_gate = gate
    return gate


def _num_chained(rig: Rig) -> int:
    return sum(any(call.row_chained) for call in rig.verifier.calls)


def test_where_nothing_is_drafted_steps_are_chained_and_the_drafter_is_left_alone() -> None:
    with running("static", prefix_cache="off") as rig:
        gate = _scripted(rig, ScriptedGate(lambda context_len: False))
        stream = rig.submit([1, 2, 3], 20)
        assert stream.text() == reference_text([1, 2, 3], 20, GREEDY)
        assert (len(rig.verifier.calls), _num_chained(rig), len(rig.drafter.calls)) == (20, 19, 0)
        assert (gate.num_plain, gate.num_steady) == (20, 19)
        assert stream.wait().speculation_off_reason == "scripted"


@pytest.mark.parametrize("ring_rows", [6, 11, 64])
def test_features_wait_until_they_would_be_overwritten(ring_rows: int) -> None:
    with running("static", prefix_cache="off", feature_ring_rows=ring_rows) as rig:
        _scripted(rig, ScriptedGate(lambda context_len: False))
        streams = rig.submit_all([[1, 2, 3], [4, 5], [6]], 40)
        for prompt, stream in zip([[1, 2, 3], [4, 5], [6]], streams, strict=True):
            assert stream.text() == reference_text(prompt, 40, GREEDY)
        counts = [count for call in rig.drafter.calls for count in call.ingest_counts]
        assert not any(call.row_slots for call in rig.drafter.calls)
        assert len(rig.drafter.calls) <= 40 // (ring_rows // 2) + 1
        assert all(count >= ring_rows // 2 for count in counts)
        assert bool(counts) is (ring_rows < 64)


@pytest.mark.parametrize("ring_rows", [7, 16, 64])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_drafting_resumes_with_the_whole_context(ring_rows: int, quality: float) -> None:
    # The fake drafter fails if a position of the context was not ingested.
    with running("static", fake_pair(quality=quality), feature_ring_rows=ring_rows) as rig:
        gate = _scripted(rig, ScriptedGate(lambda context_len: context_len % 20 >= 12))
        prompts = [[1, 2, 3], list(range(1, 25)), [7]]
        for prompt, stream in zip(prompts, rig.submit_all(prompts, 36), strict=True):
            assert stream.text() == reference_text(prompt, 36, GREEDY)
        assert len(gate.rounds) > 3
        assert {count for each in gate.rounds for count in each.num_drafted.tolist()} <= {1, 2, 3}
        assert gate.num_steady > 0
        if quality == 1.0:
            for each in gate.rounds:
                assert each.num_accepted.tolist() == each.num_verified.tolist() == each.num_drafted.tolist()


def test_the_gate_looks_ahead_while_drafted_steps_run() -> None:
    class Watch(ScriptedGate):
        def look_ahead(self, shape: StepShape, candidates: Candidates) -> None:
            shown.append((shape.num_rows, candidates.context_lens.tolist(), candidates.max_drafts.tolist()))

        def drafting(self, candidates: Candidates, decision: DraftDecision) -> None:
            decided.append((len(shown), candidates.context_lens.tolist(), bool(decision.rows)))

    shown: list[tuple[int, list[int], list[int]]] = []
    decided: list[tuple[int, list[int], bool]] = []
    with running("static", fake_pair(quality=0.0), prefix_cache="off") as rig:
        _scripted(rig, Watch(lambda context_len: context_len % 10 < 5))
        rig.submit([1, 2, 3], 20).wait()
    num_drafted = sum(is_drafted for *_, is_drafted in decided)
    assert num_drafted > 5
    assert len(shown) == num_drafted  # plain steps are planned while one runs anyway
    for before, after in itertools.pairwise(decided):
        if before[2] and after[1]:  # nothing was accepted: the next step is as it was thought to be
            num_rows, context_lens, max_drafts = shown[after[0] - 1]
            assert (num_rows, context_lens) == (1, after[1])
            assert 0 < max_drafts[0] <= 5


def test_blocks_are_as_long_as_decided_and_gains_are_counted() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        _scripted(rig, ScriptedGate(lambda context_len: True, num_slots=2))
        choice = rig.submit([1, 2, 3], 31).wait().choices[0]
        assert {call.num_draft_tokens for call in rig.drafter.calls if call.row_slots} == {2}
        assert choice.accepted_histogram == (0, 0, 10, 0, 0, 0)
        assert (choice.num_drafted, choice.num_drafted_steps) == (20, 10)
        rig.wait_until_idle()
        ledger = rig.scheduler.load().ledger
        assert (ledger.num_drafted_steps, ledger.predicted_gain_ns, ledger.measured_gain_ns) == (10, 100, -70)


@pytest.mark.parametrize("limit", [0, 1, 4, 99])
def test_a_request_caps_its_own_drafts(limit: int) -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        stream, other = rig.submit([1, 2], 20, max_draft_tokens=limit), rig.submit([3, 4], 20)
        assert stream.text() == reference_text([1, 2], 20, GREEDY)
        summary = stream.wait()
        assert max(chunk.num_verified for chunk in stream.chunks) == min(limit, 5)
        assert summary.speculation_off_reason == ("the request asked for no drafts" if limit == 0 else "")
        assert other.wait().choices[0].num_accepted > 10


@pytest.mark.parametrize(("mode", "settings", "expected"), [("fixed", {"fixed_window": 2}, 2), ("static", {}, 5)])
def test_the_modes_to_compare_with_verify_what_they_say(mode: str, settings: dict[str, int], expected: int) -> None:
    with running(mode, fake_pair(quality=1.0), **settings) as rig:
        stream = rig.submit([1, 2, 3], 40)
        assert stream.text() == reference_text([1, 2, 3], 40, GREEDY)
        assert max(chunk.num_verified for chunk in stream.chunks) == expected
        assert {call.num_draft_tokens for call in rig.drafter.calls if call.row_slots} == {expected}


def test_a_window_longer_than_the_block_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fixed_window 6 is more than the 5"), running("fixed", fixed_window=6):
        pass


@pytest.mark.parametrize(("elastic_blocks", "expected"), [(True, [3, 5]), (False, [5])])
def test_the_guard_drafts_whole_blocks_where_elastic_ones_are_switched_off(
    elastic_blocks: bool, expected: list[int]
) -> None:
    verifier, drafter = fake_pair()
    drafter.elastic_block_sizes = (3, 5)
    with running("compact", (verifier, drafter), guard=True, elastic_blocks=elastic_blocks) as rig:
        gate = rig.scheduler._batch.draft_gate
        assert isinstance(gate, Guard)
        assert gate._sizes == expected


def test_threshold_ends_a_window_at_the_first_low_confidence() -> None:
    with running("threshold", fake_pair(quality=0.7), confidence_threshold=0.5, audit_share=0.0) as rig:
        summary = rig.submit([1, 2, 3], 40).wait()
        choice = summary.choices[0]
        assert choice.num_accepted == choice.num_verified > 0  # the toy's confidences tell right from wrong


def test_cap_accept_verifies_whole_blocks_and_commits_the_scheduled_windows() -> None:
    with running("cap-accept", fake_pair(quality=1.0, confidence=0.3)) as rig:
        stream = rig.submit([1, 2, 3], 40)
        assert stream.text() == reference_text([1, 2, 3], 40, GREEDY)
        choice = stream.wait().choices[0]
        rig.wait_until_idle()
        ledger = rig.scheduler.load().ledger
        assert ledger.num_uncut_accepted == ledger.num_verified == choice.num_verified == choice.num_uncut_accepted
        assert choice.num_accepted < ledger.num_uncut_accepted


def test_steps_without_prefill_are_counted_apart() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        rig.submit([1, 2, 3], 40).wait()
        rig.wait_until_idle()
        ledger = rig.scheduler.load().ledger
        assert ledger.num_decode_steps == ledger.num_steps - 1
        assert ledger.num_decode_committed == ledger.num_committed - 1  # prefill emitted the first
        assert 0 < ledger.decode_draft_call_ns + ledger.decode_step_call_ns < ledger.decode_step_ns < ledger.step_ns


def test_confidences_that_are_none_are_counted() -> None:
    with running("static", fake_pair(quality=1.0, confidence=float("nan"))) as rig:
        rig.submit([1, 2, 3], 10).wait()
        ledger = rig.scheduler.load().ledger
        assert ledger.num_invalid_confidences == ledger.num_drafted_steps > 0
        assert ledger.num_verified == 0


@pytest.mark.parametrize("is_chained", [True, False])
def test_the_guard_itself_changes_no_text(is_chained: bool) -> None:
    prompts = [[1 + (11 * i + 5 * j) % 49 for j in range(1 + (7 * i) % 23)] for i in range(9)]
    with running("compact", guard=True, guard_probe_share=0.5, chain_plain_steps=is_chained) as rig:
        for prompt, stream in zip(prompts, rig.submit_all(prompts, 30), strict=True):
            assert stream.text() == reference_text(prompt, 30, GREEDY)  # what is drafted depends on measured times


def test_nothing_is_sent_behind_a_step_whose_end_is_not_known() -> None:
    with running("static", fake_pair(quality=0.8), prefix_cache="off") as rig:
        _scripted(rig, ScriptedGate(lambda context_len: context_len % 10 < 5))
        stream = rig.submit([1, 2, 3], 50)
        assert stream.text() == reference_text([1, 2, 3], 50, GREEDY)
        choice = stream.wait().choices[0]
        assert 0 < choice.num_drafted_steps < choice.num_steps
        assert len(rig.verifier.calls) == 1 + choice.num_steps  # none in vain


def test_choices_draft_although_the_one_that_computed_their_prompt_left_before_it_drafted() -> None:
    prompt = list(range(1, 31))
    with running("static", fake_pair(quality=1.0), prefix_cache="off") as rig:
        gate = _scripted(rig, ScriptedGate(lambda context_len: context_len >= 45))
        rig.verifier.gate = StepGate(6)
        stream = rig.submit(prompt, 30, num_choices=3)
        deadline = time.monotonic() + 20
        while not rig.drafter.calls:  # the prompt is ingested as soon as it is computed
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert stream.request is not None
        rig.scheduler.end(stream.request, choice=0)
        rig.verifier.gate.open()
        summary = stream.wait()
        assert [stream.text(choice) for choice in (1, 2)] == [reference_text(prompt, 30, GREEDY)] * 2
        assert all(choice.num_drafted for choice in summary.choices[1:])
        assert gate.rounds
