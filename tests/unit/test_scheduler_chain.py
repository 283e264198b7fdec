"""Steps sent behind the running one: the same text, tokens at once, nothing leaked when the step before ends a row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fakes.executors import VOCAB_SIZE, StepGate, fake_pair, next_token, reference_text
from fakes.rig import GREEDY, Rig, running

from kernels.philox import derive_key
from kernels.sampling import Regime, SlotSampling
from scheduler_service.request import FinishReason, SamplingOptions
from service_kit.errors import SessionMismatchError


def _prompts(count: int) -> list[list[int]]:
    return [[1 + (11 * i + 5 * j) % 49 for j in range(1 + (7 * i) % 23)] for i in range(count)]


def _num_chained(rig: Rig) -> int:
    return sum(any(call.row_chained) for call in rig.verifier.calls)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("is_chained", [True, False])
@pytest.mark.parametrize("sampling", [SamplingOptions(temperature=0.0), SamplingOptions(seed=3)])
def test_the_text_is_the_same(is_chained: bool, sampling: SamplingOptions) -> None:
    slot = GREEDY if sampling.seed is None else SlotSampling(Regime.COUPLED, key=derive_key(3, 0))
    with running("off", chain_plain_steps=is_chained, max_batch_tokens=16) as rig:
        prompts = _prompts(9)
        streams = rig.submit_all(prompts, 17, sampling=sampling)
        assert [stream.text() for stream in streams] == [reference_text(prompt, 17, slot) for prompt in prompts]
        assert bool(_num_chained(rig)) is is_chained


def test_unseeded_texts_are_drawn_at_the_same_addresses() -> None:
    with running("off") as rig:
        stream = rig.submit([1, 2, 3], 20, sampling=SamplingOptions())
        assert stream.request is not None
        assert stream.text() == reference_text([1, 2, 3], 20, stream.request.choices[0].sampling)
        assert {round_ for call in rig.verifier.calls for round_ in call.row_rounds} == {0}


def test_all_steps_of_an_answer_but_the_first_are_chained_and_none_is_in_vain_at_the_length() -> None:
    with running("off") as rig:
        rig.submit([1, 2, 3], 20).wait()
        assert (len(rig.verifier.calls), _num_chained(rig)) == (20, 19)


def test_a_step_is_sent_before_the_one_before_it_is_answered_and_tokens_come_at_once() -> None:
    with running("off") as rig:
        rig.verifier.gate = StepGate(2)
        stream = rig.submit([1, 2, 3], 20)
        # The third step is held. What the second emitted is delivered all the same.
        _wait_for(lambda: sum(len(chunk.token_ids) for chunk in stream.chunks) == 2)
        assert len(rig.verifier.calls) == 2
        rig.verifier.gate.open()
        assert stream.text() == reference_text([1, 2, 3], 20, GREEDY)


@pytest.mark.parametrize("length", range(1, 7))
def test_a_stop_token_voids_the_row_behind_it(length: int) -> None:
    prompt, other = [9, 4, 2], [5, 5]
    text = reference_text(prompt, length, GREEDY)
    expected = text[: text.index(text[-1]) + 1]
    with running("off") as rig:
        stopped, going = rig.submit_all([prompt, other], 30, stop_token_ids=frozenset(text[-1:]), ignore_eos=True)
        assert stopped.text() == expected
        assert stopped.wait().choices[0].finish_reason is FinishReason.STOP
        going_text = going.text()
        assert going_text == reference_text(other, len(going_text), GREEDY)
        ledger = rig.scheduler.load().ledger
        assert ledger.num_committed == len(expected) + len(going_text)


def test_the_last_step_of_a_stopped_request_is_taken_before_the_loop_sleeps() -> None:
    prompt = [9, 4, 2]
    text = reference_text(prompt, 3, GREEDY)
    with running("off") as rig:
        rig.submit(prompt, 30, stop_token_ids=frozenset(text[-1:])).wait()
        num_tokens = text.index(text[-1]) + 1
        _wait_for(lambda: rig.scheduler.load().ledger.num_steps == num_tokens + 1)  # one in vain
        rig.scheduler.check_integrity()
        assert rig.submit([8], 5).text() == reference_text([8], 5, GREEDY)


def test_the_slot_of_a_stopped_request_serves_the_next_one_at_once() -> None:
    prompts = _prompts(12)
    stops = frozenset(range(1, VOCAB_SIZE, 6))
    with running("off", max_num_seqs=2, kv_memory=20_000) as rig:
        streams = rig.submit_all(prompts, 30, stop_token_ids=stops)
        for prompt, stream in zip(prompts, streams, strict=True):
            tokens = list(prompt)
            while len(tokens) == len(prompt) or (tokens[-1] not in stops and len(tokens) < len(prompt) + 30):
                tokens.append(next_token(tokens, GREEDY))
            assert stream.text() == tokens[len(prompt) :]


def test_a_failed_row_voids_the_row_behind_it_and_is_retried() -> None:
    with running("off") as rig:
        rig.verifier.gate = StepGate(3)
        stream, other = rig.submit([1, 2], 9), rig.submit([3, 4], 9)
        _wait_for(lambda: len(rig.verifier.calls) == 3)
        rig.verifier.fail_rows = {0: "no such page"}
        failed = threading.Event()

        def recover(call: Any) -> None:
            rig.verifier.fail_rows = {}
            failed.set()

        rig.verifier.after_step = recover
        rig.verifier.gate.open()
        assert failed.wait(10)
        assert stream.text() == reference_text([1, 2], 9, GREEDY)
        assert other.text() == reference_text([3, 4], 9, GREEDY)
        assert len(rig.verifier.calls) <= 9 + 4, "the chain went on from a row that was void"


def test_an_abort_voids_a_first_chunk_in_flight() -> None:
    with running("off") as rig:
        rig.verifier.gate = StepGate(2)
        other = rig.submit([3, 4], 20)
        _wait_for(lambda: len(rig.verifier.calls) == 2)
        doomed = rig.submit([5] * 10, 20)
        rig.verifier.gate.open_for(1)
        _wait_for(lambda: rig.scheduler.load().num_running == 2)  # its chunk goes behind a step that is held
        assert doomed.request is not None
        rig.scheduler.end(doomed.request)
        rig.verifier.gate.open()
        assert doomed.text() == reference_text([5] * 10, len(doomed.text()), GREEDY)
        assert doomed.wait().choices[0].finish_reason is FinishReason.ABORT
        assert other.text() == reference_text([3, 4], 20, GREEDY)


def test_a_row_that_keeps_failing_ends_alone() -> None:
    with running("off") as rig:
        rig.verifier.fail_rows = {0: "no such page"}
        bad, good = rig.submit_all([[1, 2], [3, 4]], 9)
        assert bad.wait().error == "no such page"
        assert good.text() == reference_text([3, 4], 9, GREEDY)


def test_a_failed_step_fails_the_one_behind_it() -> None:
    with running("off", is_failing=True) as rig:
        rig.verifier.gate = StepGate(3)
        stream = rig.submit([1, 2], 20)
        _wait_for(lambda: len(rig.verifier.calls) == 3)
        rig.verifier.raises = SessionMismatchError("epoch 8, not 7")
        rig.verifier.gate.open()
        assert "verifier: FAILED_PRECONDITION: epoch 8, not 7" in stream.wait().error
        assert stream.text() == reference_text([1, 2], 3, GREEDY)
        assert len(rig.verifier.calls) == 3


def test_choices_are_chained_once_their_prompt_is_shared() -> None:
    prompt = list(range(1, 31))
    with running("off", fake_pair(), max_batch_tokens=8) as rig:
        stream = rig.submit(prompt, 20, num_choices=3)
        for choice in range(3):
            assert stream.text(choice) == reference_text(prompt, 20, GREEDY)
        assert _num_chained(rig) > 15
