"""Prefix reuse: only what is new is computed, texts and accepted lengths stay, nothing crosses isolation keys."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from fakes.executors import PAGE_SIZE, StepGate, fake_pair, reference_text
from fakes.rig import GREEDY, Rig, Stream, running

from kernels.philox import derive_key
from kernels.sampling import Regime, SlotSampling
from scheduler_service.admission import Limits, accept_request
from scheduler_service.batch import Batch
from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, OpenGate, StepShape
from scheduler_service.request import FinishReason, GenerateSpec, SamplingOptions

PROMPT = [1 + (7 * i) % 49 for i in range(18)]
"""Four full pages and two tokens."""


def _on_step_thread(rig: Rig, action: Callable[[Any], Any]) -> Any:
    """What `action` returns, given the batch between two steps."""
    done: Future[Any] = Future()
    rig.scheduler._loop.post(lambda: done.set_result(action(rig.scheduler._batch)))
    return done.result(10)


def _prefill_of(rig: Rig, prompt: list[int], max_tokens: int = 8, **spec: Any) -> tuple[int, Stream]:
    """Prefill tokens that a request costs, with its stream; runs alone."""
    rig.wait_until_idle()
    before = rig.scheduler.load().ledger.num_prefill_tokens
    stream = rig.submit(prompt, max_tokens, **spec)
    stream.wait()
    rig.wait_until_idle()
    return rig.scheduler.load().ledger.num_prefill_tokens - before, stream


@pytest.mark.parametrize("mode", ["off", "static", "compact"])
@pytest.mark.parametrize("num_tokens", range(9, 15))
def test_the_second_turn_computes_only_what_is_new(mode: str, num_tokens: int) -> None:
    with running(mode, fake_pair(quality=1.0)) as rig:
        num_prefilled, first = _prefill_of(rig, PROMPT, num_tokens)
        assert num_prefilled == len(PROMPT)
        assert first.wait().num_cached_tokens == 0
        # All tokens of the first turn but the last one are computed; whole pages of them are found again.
        found = (len(PROMPT) + num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        second = PROMPT + first.text() + [3, 4, 5]
        num_prefilled, stream = _prefill_of(rig, second, 12)
        assert (num_prefilled, stream.wait().num_cached_tokens) == (len(second) - found, found)
        assert stream.text() == reference_text(second, 12, GREEDY)
        choice = stream.wait().choices[0]
        assert choice.num_accepted == choice.num_verified
        assert bool(choice.num_accepted) is (mode != "off")
        load = rig.scheduler.load()
        assert (load.num_prefix_cache_queries, load.num_prefix_cache_hits) == (len(PROMPT) + len(second), found)


class _ShutGate(OpenGate):
    """Drafts nothing."""

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        return NOTHING


@pytest.mark.parametrize("ring_rows", [6, 64])
def test_a_turn_that_was_not_drafted_leaves_its_draft_context_all_the_same(ring_rows: int) -> None:
    with running("static", fake_pair(quality=1.0), feature_ring_rows=ring_rows) as rig:
        gate = _on_step_thread(rig, lambda batch: batch.draft_gate)
        _on_step_thread(rig, lambda batch: setattr(batch, "draft_gate", _ShutGate(0)))
        _, first = _prefill_of(rig, PROMPT, 15)
        assert first.wait().choices[0].num_drafted == 0
        assert any(any(call.row_chained) for call in rig.verifier.calls)
        _on_step_thread(rig, lambda batch: setattr(batch, "draft_gate", gate))
        second = PROMPT + first.text() + [3, 4, 5]
        num_prefilled, stream = _prefill_of(rig, second, 12)
        assert num_prefilled == 4
        assert stream.wait().choices[0].num_accepted == stream.wait().choices[0].num_verified > 0


def test_a_stop_string_leaves_a_whole_turn_too() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        rig.verifier.gate = StepGate(2)
        stream = rig.submit(PROMPT, 40)
        assert stream.first_chunk.wait(10)
        assert stream.request is not None
        rig.scheduler.abort(stream.request.request_id, 0, FinishReason.STOP)
        rig.verifier.gate.open()
        text = stream.text()
        assert len(text) >= 7  # the first token and a block
        num_prefilled, _ = _prefill_of(rig, PROMPT + text + [3])
        assert num_prefilled == len(PROMPT) + len(text) + 1 - (len(PROMPT) + len(text) - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.mark.parametrize("num_tokens", range(2, 9))
def test_what_a_block_holds_behind_the_stop_token_is_not_kept(num_tokens: int) -> None:
    text = reference_text(PROMPT, num_tokens, GREEDY)
    assert text.index(text[-1]) == num_tokens - 1
    with running("static", fake_pair(quality=1.0)) as rig:
        _, stream = _prefill_of(rig, PROMPT, 40, stop_token_ids=frozenset(text[-1:]))
        assert stream.text() == text
        assert rig.scheduler.load().num_cached_pages <= (len(PROMPT) + num_tokens) // PAGE_SIZE


def test_a_last_ingest_is_worth_no_preemption() -> None:
    limits = Limits(4, 64, 32, 4, PAGE_SIZE, 50, frozenset(), 5, 16)
    batch = Batch(limits, "isolated")
    for prompt in ([1] * 7, [2] * 3):
        batch.enqueue(accept_request(GenerateSpec(str(prompt), prompt), limits, lambda event: None))
    ended, running_on = batch.admit()
    ended.tokens.append(3)
    ended.computed = 8
    batch.close(ended)
    assert batch.closing == [ended]
    batch.check_integrity()
    assert batch.reserve_or_preempt(running_on, 4 * PAGE_SIZE)
    assert (batch.running, batch.closing, batch.num_preemptions) == ([running_on], [], 0)
    batch.check_integrity()


@pytest.mark.parametrize("length", [PAGE_SIZE, 2 * PAGE_SIZE, 2 * PAGE_SIZE + 1])
def test_the_last_prompt_token_is_always_computed(length: int) -> None:
    with running("off") as rig:
        assert _prefill_of(rig, PROMPT[:length])[0] == length
        _, stream = _prefill_of(rig, PROMPT[:length])
        assert stream.wait().num_cached_tokens == (length - 1) // PAGE_SIZE * PAGE_SIZE
        assert stream.text() == reference_text(PROMPT[:length], 8, GREEDY)


@pytest.mark.parametrize("mode", ["static", "fixed"])  # whose windows do not depend on measured times
@pytest.mark.parametrize("sampling", [SamplingOptions(temperature=0.0), SamplingOptions(seed=5)])
def test_the_accepted_length_after_a_hit_is_that_of_a_cold_run(mode: str, sampling: SamplingOptions) -> None:
    slot = GREEDY if sampling.seed is None else SlotSampling(Regime.COUPLED, key=derive_key(5, 0))
    with running(mode, fake_pair(quality=0.7), max_batch_tokens=8) as rig:
        _, cold = _prefill_of(rig, PROMPT, 40, sampling=sampling)
        rig.drafter.rounds.clear()  # the same key starts anew
        num_prefilled, hot = _prefill_of(rig, PROMPT, 40, sampling=sampling)
        assert num_prefilled == 2
        assert cold.text() == hot.text() == reference_text(PROMPT, 40, slot)
        assert cold.wait().choices == hot.wait().choices
        assert 0 < hot.wait().choices[0].num_accepted < hot.wait().choices[0].num_verified


@pytest.mark.parametrize("mode", ["off", "static"])
@pytest.mark.parametrize("prefix_cache", ["off", "isolated", "shared"])
def test_prefixes_do_not_cross_isolation_keys_unless_shared(mode: str, prefix_cache: str) -> None:
    with running(mode, prefix_cache=prefix_cache) as rig:
        costs = [_prefill_of(rig, PROMPT, isolation_key=key)[0] for key in (b"a", b"b", b"", b"a", b"b", b"")]
        expected = {"off": [18] * 6, "isolated": [18, 18, 18, 2, 2, 2], "shared": [18, 2, 2, 2, 2, 2]}
        assert costs == expected[prefix_cache]


def test_a_request_may_bypass_the_cache() -> None:
    with running("static") as rig:
        for _ in range(2):
            num_prefilled, stream = _prefill_of(rig, PROMPT, bypass_prefix_cache=True)
            assert (num_prefilled, stream.wait().num_cached_tokens) == (18, 0)
        assert rig.scheduler.load().num_prefix_cache_queries == 0
        assert _prefill_of(rig, PROMPT)[0] == 2  # others may use what it computed


def test_a_difference_ends_the_hit() -> None:
    with running("static") as rig:
        _prefill_of(rig, PROMPT)
        other = [*PROMPT[:9], 49, *PROMPT[10:]]  # in the third page; the fourth is equal again
        num_prefilled, stream = _prefill_of(rig, other)
        assert num_prefilled == 18 - 2 * PAGE_SIZE
        assert stream.text() == reference_text(other, 8, GREEDY)


def test_running_requests_share_what_is_computed() -> None:
    with running("off") as rig:
        rig.verifier.gate = StepGate(2)
        first = rig.submit(PROMPT, 20)
        assert first.first_chunk.wait(10)
        second = rig.submit(PROMPT, 20)
        rig.verifier.gate.open()
        assert first.text() == second.text() == reference_text(PROMPT, 20, GREEDY)
        assert second.wait().num_cached_tokens == 4 * PAGE_SIZE


def test_chunks_are_found_before_their_prompt_is_done() -> None:
    with running("off", max_batch_tokens=8) as rig:
        rig.verifier.gate = StepGate(1)
        doomed = rig.submit(PROMPT, 20)
        while not rig.verifier.calls:
            time.sleep(0.001)
        assert doomed.request is not None
        rig.scheduler.abort(doomed.request.request_id)
        rig.verifier.gate.open()
        doomed.wait()
        # A step may be under way behind the one that was let through.
        assert _prefill_of(rig, PROMPT)[1].wait().num_cached_tokens in (8, 16)


def test_a_hit_that_nobody_holds_counts_as_room_once() -> None:
    limits = Limits(4, 64, 32, 5, PAGE_SIZE, 50, frozenset(), 0, 0)
    batch = Batch(limits, "isolated")

    def enqueue(name: str, prompt: list[int]) -> None:
        batch.enqueue(accept_request(GenerateSpec(name, prompt), limits, lambda event: None))

    enqueue("first", PROMPT)
    (first,) = batch.admit()
    first.computed = len(PROMPT)
    batch.publish(first)
    batch.release(first)
    enqueue("other", [1])
    (other,) = batch.admit()
    enqueue("again", PROMPT)
    assert batch.pages.num_idle == 4  # a page of five is held; the hit takes four, and nothing is left for the tail
    assert list(batch.admit()) == []
    batch.release(other)
    (again,) = batch.admit()
    assert (again.computed, len(again.pages)) == (16, 5)
    batch.check_integrity()


def test_choices_share_a_hit() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        _prefill_of(rig, PROMPT)
        num_prefilled, stream = _prefill_of(rig, PROMPT, 12, num_choices=3)
        assert (num_prefilled, stream.wait().num_cached_tokens) == (3 * 2, 16)
        for choice in range(3):
            assert stream.text(choice) == reference_text(PROMPT, 12, GREEDY)
            assert stream.wait().choices[choice].num_accepted > 0


@pytest.mark.parametrize("mode", ["off", "static"])
def test_cached_pages_make_room_least_recently_used_first(mode: str) -> None:
    prompts = [[1 + i, *PROMPT[1:]] for i in range(4)]
    page_bytes = 1000 if mode == "off" else 1500
    # 16 pages; a request leaves 6 full ones of its 18 + 8 tokens: two fit beside a third that runs.
    with running(mode, kv_memory=16 * page_bytes) as rig:
        assert [_prefill_of(rig, prompts[i])[0] for i in (0, 1, 0, 2, 3)] == [18, 18, 2, 18, 18]
        assert rig.scheduler.load().num_cached_pages > 0
        # Prompt 1 was the least recently used when 2 came, 0 when 3 came.
        assert _on_step_thread(rig, lambda batch: batch.pages.num_free) == 16
        assert _prefill_of(rig, prompts[2])[0] == 2
        assert _prefill_of(rig, prompts[1])[0] == 18
        assert rig.scheduler.load().num_preemptions == 0


def test_preempted_requests_find_what_they_had_computed() -> None:
    costs = {}
    for prefix_cache in ("off", "isolated"):
        with running("off", kv_memory=20 * 1000, prefix_cache=prefix_cache) as rig:
            streams = rig.submit_all([[1 + i, 2, 3] for i in range(4)], 30)
            for i, stream in enumerate(streams):
                assert stream.text() == reference_text([1 + i, 2, 3], 30, GREEDY)
            assert rig.scheduler.load().num_preemptions > 0
            costs[prefix_cache] = rig.scheduler.load().ledger.num_prefill_tokens
    assert 12 < costs["isolated"] < costs["off"]


@pytest.mark.parametrize("mode", ["off", "static"])
@pytest.mark.parametrize("num_steps", range(8))
def test_what_an_abort_leaves_is_sound(mode: str, num_steps: int) -> None:
    """Aborted after any step: the same prompt again is answered right, and drafted on a complete context."""
    with running(mode, fake_pair(quality=1.0), max_batch_tokens=8) as rig:
        rig.verifier.gate = StepGate(num_steps)
        doomed = rig.submit(PROMPT, 40)
        deadline = time.monotonic() + 10
        while len(rig.verifier.calls) < num_steps:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert doomed.request is not None
        rig.scheduler.abort(doomed.request.request_id)
        rig.verifier.gate.open()
        whole = PROMPT + doomed.text()
        rig.scheduler.check_integrity()
        num_calls = len(rig.drafter.calls)
        rig.wait_until_idle()
        assert len(rig.drafter.calls) == num_calls, "an abort is not worth an ingest"
        _, stream = _prefill_of(rig, whole, 12)
        assert stream.text() == reference_text(whole, 12, GREEDY)
        assert stream.wait().choices[0].num_accepted == stream.wait().choices[0].num_verified


def test_a_gap_in_the_draft_context_is_recomputed_into_fresh_pages() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        _prefill_of(rig, PROMPT)

        def new_drafter_epoch(batch: Any) -> None:
            batch.pages.clear_draft_context()
            rig.drafter.kv.clear()

        _on_step_thread(rig, new_drafter_epoch)
        # The target still has the pages, the drafter does not: the fresh ones take their names over.
        for expected in (18, 2):
            num_prefilled, stream = _prefill_of(rig, PROMPT, 12)
            assert num_prefilled == expected
            assert stream.text() == reference_text(PROMPT, 12, GREEDY)
            assert stream.wait().choices[0].num_accepted == stream.wait().choices[0].num_verified > 0


def test_a_new_verifier_epoch_clears_everything() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        _prefill_of(rig, PROMPT)

        def new_verifier_epoch(batch: Any) -> None:
            batch.pages.forget_all()
            rig.verifier.kv.clear()
            rig.drafter.kv.clear()

        _on_step_thread(rig, new_verifier_epoch)
        assert rig.scheduler.load().num_cached_pages == 0
        assert _prefill_of(rig, PROMPT)[0] == 18


def test_a_lost_draft_context_names_pages_for_the_target_only() -> None:
    with running("static", fake_pair(quality=1.0)) as rig:
        rig.drafter.fail_ingest_slots = {0, 1, 2, 3}
        _prefill_of(rig, PROMPT)
        rig.drafter.fail_ingest_slots = set()
        num_prefilled, stream = _prefill_of(rig, PROMPT)
        assert num_prefilled == 18
        assert stream.wait().choices[0].num_accepted == stream.wait().choices[0].num_verified > 0


def test_what_failed_is_not_reused() -> None:
    with running("off", max_batch_tokens=8) as rig:
        rig.verifier.after_step = lambda _: setattr(rig.verifier, "fail_rows", {0: "not finite", 1: "not finite"})
        stream = rig.submit(PROMPT, 8)
        assert stream.wait().error == "not finite"
        rig.verifier.after_step, rig.verifier.fail_rows = None, {}
        assert _prefill_of(rig, PROMPT)[0] == 18
