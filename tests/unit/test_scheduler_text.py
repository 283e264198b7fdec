"""The text is the target's own, whatever is drafted, trimmed, shared, preempted or interrupted."""

from __future__ import annotations

import pytest
from fakes.executors import fake_pair, reference_text
from fakes.rig import GREEDY, running

from kernels.philox import derive_key
from kernels.sampling import Regime, SlotSampling
from scheduler_service.request import FinishReason, SamplingOptions

MODES = ("off", "static", "compact")


def _prompts(count: int) -> list[list[int]]:
    return [[1 + (7 * i + 3 * j) % 49 for j in range(1 + (5 * i) % 23)] for i in range(count)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
def test_greedy_text_is_plain_decoding(mode: str, quality: float) -> None:
    with running(mode, fake_pair(quality=quality)) as rig:
        prompts = _prompts(9)
        streams = rig.submit_all(prompts, 17)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.text() == reference_text(prompt, 17, GREEDY)
            assert stream.wait().choices[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("mode", MODES)
def test_seeded_text_and_choices(mode: str) -> None:
    with running(mode) as rig:
        stream = rig.submit([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 9, sampling=SamplingOptions(seed=42), num_choices=3)
        for choice in range(3):
            sampling = SlotSampling(Regime.COUPLED, key=derive_key(42, choice))
            assert stream.text(choice) == reference_text([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 9, sampling)
        assert len({tuple(stream.text(choice)) for choice in range(3)}) == 3


def test_off_never_touches_the_drafter() -> None:
    pair = fake_pair()
    with running("off", pair) as rig:
        assert rig.submit([1, 2, 3]).wait().speculation_off_reason == "verify_mode is off"
    assert not pair[1].attaches
    assert not pair[1].calls
    assert pair[0].attaches[0].feature_ring_rows == 0
    assert pair[0].attaches[0].max_draft_tokens == 0


def test_unseeded_requests_draw_their_own_keys() -> None:
    with running("static") as rig:
        first, second = (rig.submit([1, 2, 3], 12, sampling=SamplingOptions(), num_choices=2) for _ in range(2))
        assert len({tuple(stream.text(choice)) for stream in (first, second) for choice in (0, 1)}) == 4


def test_attach_order_and_sizes() -> None:
    verifier, drafter = pair = fake_pair()
    with running("static", pair):
        first, second = verifier.attaches
        assert (first.draft_probs_arena, second.draft_probs_arena) == ("", "draft-probs")
        assert first.session == second.session == drafter.attaches[0].session != 0
        assert first.num_pages == drafter.attaches[0].num_pages == 64  # 4 slots of 16 pages, fewer than memory holds
        assert list(first.feature_layer_ids) == [1, 3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_stop_token_inside_a_block(mode: str, num_tokens: int) -> None:
    prompt = [9, 4, 2]
    text = reference_text(prompt, num_tokens, GREEDY)
    with running(mode, fake_pair(quality=1.0)) as rig:
        stream = rig.submit(prompt, 30, stop_token_ids=frozenset(text[-1:]))
        expected = text[: text.index(text[-1]) + 1]
        assert stream.text() == expected
        choice = stream.wait().choices[0]
        assert choice.finish_reason is FinishReason.STOP
        assert choice.num_tokens == len(expected)
        assert choice.num_accepted == sum(chunk.num_accepted for chunk in stream.chunks)
        assert all(chunk.num_accepted <= len(chunk.token_ids) for chunk in stream.chunks)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens(mode: str, max_tokens: int) -> None:
    with running(mode, fake_pair(quality=1.0)) as rig:
        stream = rig.submit([3, 1], max_tokens)
        assert stream.text() == reference_text([3, 1], max_tokens, GREEDY)
        assert stream.wait().choices[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt_len", [1, 55, 60, 62, 63])
def test_the_context_limit_ends_the_text(mode: str, prompt_len: int) -> None:
    prompt = _prompts(1)[0] * prompt_len
    with running(mode, fake_pair(quality=1.0)) as rig:
        for max_tokens in (None, 500):
            stream = rig.submit(prompt, max_tokens)
            assert stream.text() == reference_text(prompt, 64 - prompt_len, GREEDY)


def test_statistics_add_up() -> None:
    with running("static", fake_pair(quality=0.8)) as rig:
        stream = rig.submit([4, 4, 4], 40)
        choice = stream.wait().choices[0]
        rig.wait_until_idle()
        load = rig.scheduler.load()
        assert choice.num_tokens == 40
        assert sum(choice.accepted_histogram) == choice.num_steps
        assert sum(k * count for k, count in enumerate(choice.accepted_histogram)) == choice.num_accepted
        assert 1 + choice.num_steps + choice.num_accepted == 40  # nothing was cut: drafts stop at max_tokens - 1
        assert choice.num_accepted <= choice.num_verified <= choice.num_drafted
        assert (load.ledger.num_committed, load.ledger.num_prefill_tokens) == (40, 3)
        assert load.ledger.num_verify_rows == choice.num_steps
        assert load.ledger.drafter_model_ns == 500 * len(rig.drafter.calls)


def test_chunked_prefill_respects_the_budget() -> None:
    prompts = [[1 + i] * 40 for i in range(4)]
    with running("static", max_batch_tokens=16) as rig:
        streams = rig.submit_all(prompts, 10)
        assert [stream.text() for stream in streams] == [reference_text(prompt, 10, GREEDY) for prompt in prompts]
        assert max(len(call.token_ids) for call in rig.verifier.calls) == 16


def test_the_feature_ring_caps_a_chunk() -> None:
    with running("static", feature_ring_rows=6) as rig:
        assert rig.submit([2] * 30, 12).text() == reference_text([2] * 30, 12, GREEDY)
        assert max(max(call.row_num_tokens) for call in rig.verifier.calls) == 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_prefill_decode_steps", [0.001, 0.5, 4.0])
def test_prefill_bounded_by_time_changes_no_text(mode: str, max_prefill_decode_steps: float) -> None:
    prompts = [[1 + i] * 40 for i in range(6)]
    with running(mode, max_prefill_decode_steps=max_prefill_decode_steps) as rig:
        streams = rig.submit_all(prompts, 15)
        assert [stream.text() for stream in streams] == [reference_text(prompt, 15, GREEDY) for prompt in prompts]
