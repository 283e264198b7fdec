"""Requests that share, wait, are preempted, fail, leave or are refused: nothing leaks and nothing else suffers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fakes.executors import PAGE_SIZE, StepGate, fake_pair, reference_text
from fakes.rig import GREEDY, running

from scheduler_service.request import FinishReason, SamplingOptions
from service_kit.errors import InvalidRequestError, QueueFullError, SessionMismatchError, UnavailableError


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("mode", ["off", "static", "compact"])
def test_preemption_recomputes_and_never_fails(mode: str) -> None:
    prompts = [[1 + i, 2, 3] for i in range(4)]
    # 20 pages of 4 positions: four requests of 3 + 30 tokens (36 pages) cannot all stay.
    with running(mode, kv_memory=20 * (1000 if mode == "off" else 1500)) as rig:
        streams = rig.submit_all(prompts, 30)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.text() == reference_text(prompt, 30, GREEDY)
        assert rig.scheduler.load().num_preemptions > 0
        rig.wait_until_idle()


def test_the_round_survives_preemption() -> None:
    prompts = [[1 + i, 2, 3] for i in range(4)]
    with running("static", kv_memory=20 * 1500) as rig:
        streams = rig.submit_all(prompts, 30, sampling=SamplingOptions())
        for stream in streams:
            stream.wait()
        assert rig.scheduler.load().num_preemptions > 0
        for stream in streams:  # the fake drafter refuses a round that was used before
            assert stream.request is not None
            assert stream.request.choices[0].round >= stream.wait().choices[0].num_drafted // 5


@pytest.mark.parametrize("max_batch_tokens", [48, 8])
def test_choices_share_the_prompts_full_pages(max_batch_tokens: int) -> None:
    prompt = list(range(1, 31))
    with running("static", fake_pair(quality=1.0), max_batch_tokens=max_batch_tokens) as rig:
        stream = rig.submit(prompt, 20, num_choices=4)
        for choice in range(4):
            assert stream.text(choice) == reference_text(prompt, 20, GREEDY)
        # Choice 0 computes 30 positions, the others the tail behind 7 full pages.
        assert rig.scheduler.load().ledger.num_prefill_tokens == 30 + 3 * 2
        assert all(choice.num_accepted for choice in stream.wait().choices)
        rig.wait_until_idle()


@pytest.mark.parametrize("when", ["at once", "after the first chunk"])
def test_choice_0_leaves_while_the_others_need_its_prompt(when: str) -> None:
    prompt = list(range(1, 31))
    with running("static", max_batch_tokens=8) as rig:
        num_steps = 1 if when == "after the first chunk" else 0
        rig.verifier.gate = StepGate(num_steps)
        stream = rig.submit(prompt, 12, num_choices=3)
        _wait_for(lambda: len(rig.verifier.calls) == num_steps)
        rig.scheduler.abort(stream.request.request_id if stream.request else "", 0)
        rig.verifier.gate.open()
        for choice in (1, 2):
            assert stream.text(choice) == reference_text(prompt, 12, GREEDY)
        assert stream.wait().choices[0].finish_reason is FinishReason.ABORT
        rig.wait_until_idle()


def test_choices_with_preemption() -> None:
    prompt = list(range(1, 18))
    with running("static", kv_memory=18 * 1500) as rig:
        streams = [rig.submit(prompt, 30, num_choices=3), rig.submit([7], 30)]
        for choice in range(3):
            assert streams[0].text(choice) == reference_text(prompt, 30, GREEDY)
        assert streams[1].text() == reference_text([7], 30, GREEDY)
        assert rig.scheduler.load().num_preemptions > 0
        rig.wait_until_idle()


@pytest.mark.parametrize("mode", ["off", "static"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 8])
def test_abort_at_any_point(mode: str, num_steps: int) -> None:
    with running(mode, max_batch_tokens=8) as rig:
        rig.verifier.gate = StepGate(num_steps)
        doomed = rig.submit([1] * 20, 40)
        other = rig.submit([2] * 9, 40)
        _wait_for(lambda: len(rig.verifier.calls) == num_steps)
        for _ in range(2):
            rig.scheduler.abort(doomed.request.request_id if doomed.request else "")
        rig.verifier.gate.open()
        text = doomed.text()
        assert text == reference_text([1] * 20, len(text), GREEDY)
        assert doomed.wait().choices[0].finish_reason is FinishReason.ABORT
        assert other.text() == reference_text([2] * 9, 40, GREEDY)
        rig.scheduler.abort("never heard of")
        rig.wait_until_idle()


def test_a_stop_string_is_a_finish() -> None:
    with running() as rig:
        rig.verifier.gate = StepGate()
        stream = rig.submit([1], 40)
        rig.scheduler.abort(stream.request.request_id if stream.request else "", 0, FinishReason.STOP)
        rig.verifier.gate.open()
        assert stream.wait().choices[0].finish_reason is FinishReason.STOP


def test_twenty_clients_vanish() -> None:
    with running("static") as rig:
        streams = [rig.submit([1 + i, 3], None) for i in range(20)]
        for stream in streams[:4]:
            assert stream.first_chunk.wait(10)
        for stream in streams:
            assert stream.request is not None
            rig.scheduler.end(stream.request)
        rig.wait_until_idle()


def test_the_queue_is_bounded() -> None:
    with running("off", max_num_seqs=1, max_queued_requests=3, max_queued_tokens=40) as rig:
        rig.verifier.gate = StepGate()
        first = rig.submit([1], 3)
        _wait_for(lambda: rig.scheduler.load().num_running == 1)
        waiting = [rig.submit([2] * 30, 3)]
        with pytest.raises(QueueFullError, match="30 prompt tokens are waiting"):
            rig.submit([2] * 11, 3)
        waiting += [rig.submit([2], 3), rig.submit([2], 3)]
        with pytest.raises(QueueFullError, match="3 requests are waiting"):
            rig.submit([2], 3)
        rig.scheduler.abort(waiting[0].request.request_id if waiting[0].request else "")
        rig.verifier.gate.open()
        for stream in [first, *waiting]:
            stream.wait()
        rig.submit([2] * 30, 3).wait()


def test_refusals_name_the_field() -> None:
    cases = [
        ({"prompt": []}, "prompt_token_ids", "no tokens"),
        ({"prompt": [1] * 64}, "prompt_token_ids", "64 tokens, the context holds 64"),
        ({"prompt": [50]}, "prompt_token_ids", r"0 \.\.\. 49"),
        ({"prompt": [1], "num_choices": 5}, "n", "n is 5; this server runs at most 4"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": [1], "sampling": SamplingOptions(temperature=float("nan"))}, "temperature", "finite"),
        ({"prompt": [1], "sampling": SamplingOptions(temperature=-1)}, "temperature", ">= 0"),
        ({"prompt": [1], "sampling": SamplingOptions(top_p=0)}, "top_p", "top_p"),
        ({"prompt": [1], "sampling": SamplingOptions(min_p=1.5)}, "min_p", "min_p"),
        ({"prompt": [1], "sampling": SamplingOptions(top_k=2**31)}, "top_k", "top_k"),
        ({"prompt": [1], "request_id": ""}, "request_id", "empty"),
    ]
    with running("off") as rig:
        for spec, name, words in cases:
            with pytest.raises(InvalidRequestError, match=words) as raised:
                rig.submit(**spec)  # type: ignore[arg-type]
            assert raised.value.field == name
    with running("off", kv_memory=16_000) as rig:
        with pytest.raises(InvalidRequestError, match="needs 17 pages of 4 positions, all the memory holds is 16"):
            rig.submit([1] * 55, 2, num_choices=4)
        rig.submit([1] * 50, 2, num_choices=4).wait()


def test_a_live_request_id_is_refused_and_then_free_again() -> None:
    with running("off") as rig:
        rig.verifier.gate = StepGate()
        first = rig.submit([1], 3, request_id="same")
        with pytest.raises(InvalidRequestError, match="in use"):
            rig.submit([1], 3, request_id="same")
        rig.verifier.gate.open()
        first.wait()
        rig.submit([1], 3, request_id="same").wait()


def test_a_failed_row_is_retried_without_drafts() -> None:
    with running("static") as rig:
        rig.verifier.fail_drafted = True
        stream = rig.submit([1, 2], 9)
        assert stream.text() == reference_text([1, 2], 9, GREEDY)
        assert stream.wait().choices[0].num_accepted == 0


def test_a_row_that_keeps_failing_ends_alone() -> None:
    with running("static") as rig:
        rig.verifier.fail_rows = {0: "no such page"}  # the first request gets slot 0
        bad, good = rig.submit_all([[1, 2], [3, 4]], 9)
        assert bad.wait().error == "no such page"
        assert bad.wait().choices[0].finish_reason is FinishReason.ERROR
        assert good.text() == reference_text([3, 4], 9, GREEDY)
        rig.wait_until_idle()


def test_a_lost_draft_context_means_plain_decoding() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        rig.drafter.fail_ingest_slots = {0}
        lost, kept = rig.submit_all([[1, 2], [3, 4]], 9)
        assert lost.text() == reference_text([1, 2], 9, GREEDY)
        assert lost.wait().speculation_off_reason == "draft context lost: the row is gone"
        assert lost.wait().choices[0].num_verified == 0
        assert kept.text() == reference_text([3, 4], 9, GREEDY)
        assert kept.wait().choices[0].num_accepted > 0
        assert kept.wait().speculation_off_reason == ""


def test_a_bad_reply_for_one_row_fails_that_request_only() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        bad = rig.submit([1, 2], 9)
        assert bad.request is not None
        bad.request.stop_token_ids = None  # type: ignore[assignment] # a bug that strikes at commit
        good = rig.submit([3, 4], 9)
        assert "'NoneType'" in bad.wait().error
        assert good.text() == reference_text([3, 4], 9, GREEDY)


@pytest.mark.parametrize("executor", ["verifier", "drafter"])
def test_an_executor_that_fails_ends_every_request_with_the_reason(executor: str) -> None:
    reasons: list[str] = []
    with running("static", is_failing=True, max_num_seqs=2) as rig:
        rig.scheduler.set_delivery(lambda batch: [sink(event) for sink, event in batch], reasons.append)
        streams = rig.submit_all([[1], [2], [3]], None)
        getattr(rig, executor).raises = SessionMismatchError("epoch 8, not 7")
        for stream in streams:
            assert f"{executor}: FAILED_PRECONDITION: epoch 8, not 7" in stream.wait().error
            assert stream.wait().choices[0].finish_reason is FinishReason.ERROR
        with pytest.raises(UnavailableError, match="stopped"):
            rig.submit([1])
        assert reasons == [rig.scheduler.failure]


def test_drain_feeds_running_streams_and_refuses_new_ones() -> None:
    with running("static") as rig:
        rig.verifier.gate = StepGate()
        stream = rig.submit([1, 2], 20)
        assert not rig.scheduler.drain(0.01)
        with pytest.raises(UnavailableError, match="draining"):
            rig.submit([1])
        rig.verifier.gate.open()
        assert rig.scheduler.drain(10)
        assert stream.text() == reference_text([1, 2], 20, GREEDY)
        rig.wait_until_idle()


def test_drafts_take_no_page_from_a_running_request() -> None:
    # 8 + 8 positions at the end of both answers: exactly the four pages there are, none for look-ahead.
    with running("static", fake_pair(quality=1.0), max_num_seqs=2, kv_memory=4 * 1500, max_model_len=16) as rig:
        streams = rig.submit_all([[1, 2, 3, 4], [5, 6, 7, 8]], 4)
        assert [s.text() for s in streams] == [reference_text(p, 4, GREEDY) for p in ([1, 2, 3, 4], [5, 6, 7, 8])]
        assert rig.scheduler.load().num_preemptions == 0
        assert rig.scheduler.load().num_pages == 16 // PAGE_SIZE
