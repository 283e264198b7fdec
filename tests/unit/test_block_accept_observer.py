"""The block-accept estimate of running schedulers on the toy models, beside what whole blocks were worth."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fakes.executors import FakeDrafter, FakeVerifier, Ring, StepGate, _hash, reference_text
from fakes.rig import GREEDY, Rig, running

from scheduler_service import startup
from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, OpenGate, StepShape
from scheduler_service.ledger import Ledger
from scheduler_service.policy.cap_accept import CapAcceptPolicy
from scheduler_service.policy.threshold import ThresholdPolicy
from scheduler_service.request import SamplingOptions

PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9, 7]]
NUM_TOKENS = 40
SAMPLINGS = {
    "greedy": SamplingOptions(temperature=0.0),
    "coupled": SamplingOptions(seed=7),
    "rejection": SamplingOptions(),
}


class MoodyDrafter(FakeDrafter):
    """Confidences without any sense."""

    def _block(self, slot: int, anchor: int, position: int, round_: int) -> list[tuple[int, float]]:
        block = super()._block(slot, anchor, position, round_)
        return [(draft, 0.9 if _hash("mood", position, k) % 3 else 0.2) for k, (draft, _) in enumerate(block)]


def _pair() -> tuple[FakeVerifier, MoodyDrafter]:
    ring = Ring()
    return FakeVerifier(ring, max_position=64), MoodyDrafter(ring, quality=0.8)


def _generate(rig: Rig, sampling: SamplingOptions, **spec: Any) -> Ledger:
    for stream in [rig.submit(prompt, NUM_TOKENS, sampling=sampling, **spec) for prompt in PROMPTS]:
        stream.wait()
    rig.wait_until_idle()
    return rig.scheduler.load().ledger


def _cap_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "create_policy", lambda *_: CapAcceptPolicy(ThresholdPolicy(0.5)))


@pytest.mark.parametrize("regime", ["greedy", "coupled"])
def test_trimmed_rounds_of_whole_texts_tell_what_whole_blocks_were_worth(
    regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("threshold", _pair(), audit_share=0.0) as rig:
        trimmed = _generate(rig, SAMPLINGS[regime])
    _cap_accept(monkeypatch)
    with running("threshold", _pair(), audit_share=0.0) as rig:
        whole = _generate(rig, SAMPLINGS[regime])
    assert trimmed.num_verified < whole.num_verified
    truth = whole.num_uncut_accepted + whole.num_blocks
    assert trimmed.num_blocks == whole.num_blocks
    assert trimmed.num_uncut_accepted + trimmed.num_blocks < truth
    # A block reaches no further than its text may, and the first token that differs decides: nothing stays open.
    for each in (trimmed, whole):
        assert each.block_accept_low == each.block_accept_high == truth
        assert each.num_open_blocks == 0


def test_drafts_behind_a_stop_token_count_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = frozenset(reference_text(PROMPTS[0], 12, GREEDY)[9:11])
    _cap_accept(monkeypatch)
    with running("threshold", _pair(), audit_share=0.0) as rig:
        ledger = _generate(rig, SAMPLINGS["greedy"], stop_token_ids=stops)
    assert ledger.num_committed < NUM_TOKENS * len(PROMPTS)
    assert ledger.block_accept_low == ledger.block_accept_high == ledger.num_uncut_accepted + ledger.num_blocks


@pytest.mark.parametrize("chain_plain_steps", [False, True])
def test_only_rejection_rows_ask_and_all_they_need_is_answered(chain_plain_steps: bool) -> None:
    verifier, drafter = _pair()
    with running("threshold", (verifier, drafter), chain_plain_steps=chain_plain_steps, audit_share=0.0) as rig:
        streams = [
            rig.submit(prompt, NUM_TOKENS, sampling=sampling) for sampling in SAMPLINGS.values() for prompt in PROMPTS
        ]
        for stream in streams:
            stream.wait()
        rig.wait_until_idle()
        ledger = rig.scheduler.load().ledger
    asked = [call for call in verifier.calls if call.prob_rows]
    assert asked
    assert any(not call.row_num_drafts[row] for call in asked for row in call.prob_rows)  # by later rounds as well
    assert ledger.num_uncut_accepted + ledger.num_blocks < ledger.block_accept_low
    # The toys are certain: without an answer a block would stay open.
    assert (ledger.num_open_blocks, ledger.block_accept_high) == (0, ledger.block_accept_low)


class AtTimes(OpenGate):
    """Drafts at half of all context lengths."""

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        is_drafting = candidates.num_rows > 0 and candidates.context_lens[0] % 10 < 5
        return super().decide(shape, candidates) if is_drafting else NOTHING


def test_chained_steps_are_asked_too() -> None:
    with running("threshold", _pair(), audit_share=0.0) as rig:
        rig.scheduler._batch.draft_gate = AtTimes(5)
        for prompt in PROMPTS:
            rig.submit(prompt, NUM_TOKENS, sampling=SAMPLINGS["rejection"]).wait()
        rig.wait_until_idle()
        ledger = rig.scheduler.load().ledger
    assert any(call.prob_rows and any(call.row_chained) for call in rig.verifier.calls)
    assert ledger.num_uncut_accepted + ledger.num_blocks < ledger.block_accept_low
    unverified = sum(  # then the next step may be sent before anybody knows of the block
        len(step.prob_rows) > 0 and not any(step.row_num_drafts) and not any(step.row_chained)
        for step in rig.verifier.calls
    )
    assert ledger.num_open_blocks <= unverified


def test_blocks_verified_whole_are_known() -> None:
    with running("static") as rig:
        ledger = _generate(rig, SAMPLINGS["rejection"])
    assert ledger.block_accept_low == ledger.block_accept_high == ledger.num_uncut_accepted + ledger.num_blocks
    assert ledger.num_blocks > 10
    assert ledger.num_open_blocks == 0
    assert not any(call.prob_rows for call in rig.verifier.calls)


def test_without_drafts_there_is_nothing_to_know() -> None:
    with running("off") as rig:
        assert _generate(rig, SAMPLINGS["greedy"]).num_blocks == 0


def test_an_aborted_text_leaves_its_blocks_open() -> None:
    num_open = []
    for num_steps in range(2, 7):
        with running("threshold", _pair(), audit_share=0.0) as rig:
            rig.verifier.gate = StepGate(num_steps)
            stream = rig.submit(PROMPTS[0], NUM_TOKENS)
            assert stream.request is not None
            while len(rig.verifier.calls) < num_steps:
                time.sleep(0.001)
            rig.scheduler.abort(stream.request.request_id)
            rig.verifier.gate.open()
            stream.wait()
            ledger = _generate(rig, SAMPLINGS["greedy"])  # the steps that follow notice
        assert (ledger.block_accept_low < ledger.block_accept_high) == (ledger.num_open_blocks > 0)
        num_open.append(ledger.num_open_blocks)
    assert 0 < sum(num_open) < 3 * len(num_open)
