"""The drafter's contract: sessions, stamps, replays, regimes and block lengths, called as the scheduler calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_harness import SESSION, TARGET, VANILLA_DRAFTER, DrafterHarness, Tensors, make_checkpoint
from dspark.v1 import drafter_pb2

from drafter_service.calibration import fingerprints
from drafter_service.pair import check_pair
from kernels.sampling import Regime
from service_kit.errors import InvalidRequestError, SessionMismatchError, StaleArenaError
from service_kit.handoff import Arena

CONTEXT, ANCHOR_ID = 21, 17
Run = Callable[..., DrafterHarness]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Run]:
    """Starts harnesses that are closed at the end."""
    started: list[DrafterHarness] = []

    def run(drafter: Path = VANILLA_DRAFTER, **arguments: Any) -> DrafterHarness:
        started.append(DrafterHarness(drafter, TARGET, **arguments))
        return started[-1]

    yield run
    for harness in started:
        harness.__exit__()


def features(seed: int, count: int = CONTEXT) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 192), np.float32)


def prepare(harness: DrafterHarness, slot: int, regime: Regime = Regime.GREEDY, seed: int = 0) -> None:
    """A slot with CONTEXT positions of features in the ring, on pages of its own."""
    harness.admit(slot, regime, pages=[slot * 3 + page for page in (2, 0, 1)])
    harness.write_features(slot, 0, features(seed), step_id=5)


def ingest_of(slot: int, start: int = 0, end: int = CONTEXT) -> tuple[int, int, int, int, int]:
    return (slot, start, end - start, 4, 6)


def row_of(slot: int, round_: int = 1) -> tuple[int, int, int, int]:
    return (slot, ANCHOR_ID, CONTEXT, round_)


def draft_one(harness: DrafterHarness, num_drafts: int = 7, seed: int = 0) -> drafter_pb2.DraftResponse:
    """One greedy block over a fresh slot 0."""
    prepare(harness, 0, seed=seed)
    return harness.draft(ingests=[ingest_of(0)], rows=[row_of(0)], num_drafts=num_drafts)


def confidences(reply: drafter_pb2.DraftResponse) -> np.ndarray:
    return np.frombuffer(reply.confidences, "<f4")


def test_info_describes_the_drafter(start: Run) -> None:
    harness = start()
    info = harness.servicer.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest())
    assert (info.contract_version, info.block_size, list(info.elastic_block_sizes)) == (2, 7, [7])
    assert (info.target_vocab_size, info.draft_vocab_size, info.target_hidden_size) == (512, 512, 64)
    assert (list(info.target_layer_ids), info.num_target_layers) == ([0, 2, 4], 6)
    assert (info.page_size, info.page_bytes) == (16, 2 * 2 * 2 * 16 * 16 * 4)
    assert info.has_confidence_head
    assert info.weight_format == "float32"
    assert info.epoch == harness.info.epoch != 0
    assert info.fingerprint


def test_each_row_is_calibrated_by_its_regime(start: Run, tmp_path: Path) -> None:
    plain = start()
    assert plain.servicer.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest()).calibration.startswith("none (no ")
    drafter = make_checkpoint(tmp_path / "drafter", {})
    temperatures = {"greedy": 2.0, "coupled": 0.5, "rejection": 1.0}
    content = {
        "format": 1,
        "block_size": 7,
        "fingerprints": fingerprints(check_pair(drafter, TARGET)),
        "temperatures": {regime: [value] * 7 for regime, value in temperatures.items()},
        "shifts": {regime: [0.25] * 7 for regime in temperatures},
    }
    (drafter / "calibration.json").write_text(json.dumps(content))
    calibrated = start(drafter)
    info = calibrated.servicer.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest())
    assert info.calibration == f"{drafter}/calibration.json (fitted with unknown target weights)"
    logits = []
    for harness in (plain, calibrated):
        for slot, regime in enumerate((Regime.COUPLED, Regime.GREEDY)):
            prepare(harness, slot, regime)
        reply = harness.draft(ingests=[ingest_of(0), ingest_of(1)], rows=[row_of(1), row_of(0)], num_drafts=3)
        found = confidences(reply).reshape(2, 3).astype(np.float64)
        logits.append(np.log(found / (1 - found)))
    expected = logits[0] / np.array([[temperatures["greedy"]], [temperatures["coupled"]]]) + 0.25
    np.testing.assert_allclose(logits[1], expected, rtol=1e-4, atol=1e-5)


def test_attach_is_idempotent(start: Run) -> None:
    harness = start()
    assert harness.attach() == harness.info
    assert harness.info.draft_to_target_arena == ""


def test_a_new_ring_keeps_the_context_and_remakes_what_the_verifier_reads(start: Run) -> None:
    harness = start()
    before = draft_one(harness)
    harness.ring.close()
    harness.new_ring(SESSION)
    info = harness.attach()
    assert info.epoch == harness.info.epoch
    assert info.draft_probs_arena != harness.info.draft_probs_arena
    assert harness.draft(rows=[row_of(0)], num_drafts=7).token_ids == before.token_ids


def test_a_new_session_drops_the_old_one(start: Run) -> None:
    harness = start()
    draft_one(harness)
    harness.ring.close()
    harness.new_ring(SESSION + 1)
    harness.attach(SESSION + 1)
    with pytest.raises(SessionMismatchError, match="another session"):
        harness.draft(rows=[row_of(0)], num_drafts=7)
    with pytest.raises(SessionMismatchError, match="slot 0 is not admitted"):
        harness.draft(rows=[row_of(0)], num_drafts=7, session=SESSION + 1)


def test_sizes_of_a_session_cannot_change(start: Run) -> None:
    harness = start()
    harness.sizes["num_pages"] = 17
    with pytest.raises(SessionMismatchError, match="cannot change"):
        harness.attach()


def test_a_ring_of_another_session_or_shape_is_refused(start: Run) -> None:
    harness = start()
    harness.new_ring(SESSION + 1)
    with pytest.raises(StaleArenaError, match="is of session"):
        harness.attach()
    harness.ring.close()
    harness.sizes["num_slots"] = 3
    harness.new_ring(SESSION)
    harness.sizes["num_slots"] = 4
    with pytest.raises(StaleArenaError, match=r"is \[3, 64, 192\] float32: the drafter reads \[4, rows, 192\]"):
        harness.attach()


def test_another_epoch_is_refused(start: Run) -> None:
    harness = start()
    with pytest.raises(SessionMismatchError, match="another session or epoch"):
        harness.draft(epoch=harness.info.epoch + 1)


def test_a_repeated_step_is_answered_from_the_last_reply(start: Run) -> None:
    harness = start()
    first = draft_one(harness)
    harness.ring.stamps[:] = 0  # a second run of the same work would fail
    repeated = harness.draft(ingests=[ingest_of(0)], rows=[row_of(0)], num_drafts=7, step_id=harness.step_id)
    assert repeated == first
    with pytest.raises(SessionMismatchError, match="older"):
        harness.draft(step_id=harness.step_id - 2)


@pytest.mark.parametrize(
    ("word", "value"), [(0, SESSION + 1), (1, 3), (1, 7), (2, 1), (3, 9 + 64)], ids=lambda value: str(value)
)
def test_a_stale_row_fails_its_ingest_alone(start: Run, word: int, value: int) -> None:
    harness = start()
    prepare(harness, 0, seed=1)
    prepare(harness, 2, seed=2)
    harness.ring.stamps[0, 9, word] = value
    reply = harness.draft(ingests=[ingest_of(0), ingest_of(2)], rows=[row_of(0), row_of(2)], num_drafts=7)
    assert [failure.row for failure in reply.ingest_failures] == [0]
    assert "slot 0, position 9 is stale" in reply.ingest_failures[0].reason
    assert reply.token_ids[7:] == draft_one(start(), seed=2).token_ids


def test_the_ring_is_read_by_position(start: Run) -> None:
    whole, wrapped = start(), start(ring_rows=8)
    expected = draft_one(whole)
    wrapped.admit(0, Regime.GREEDY, pages=[2, 0, 1])
    for first in range(0, CONTEXT, 6):
        last = min(CONTEXT, first + 6)
        wrapped.write_features(0, first, features(0)[first:last], step_id=5)
        wrapped.draft(ingests=[ingest_of(0, first, last)])
    reply = wrapped.draft(rows=[row_of(0)], num_drafts=7)
    assert reply.token_ids == expected.token_ids
    np.testing.assert_allclose(confidences(reply), confidences(expected), rtol=1e-5)


def test_rows_do_not_depend_on_the_rows_beside_them(start: Run) -> None:
    harness = start()
    for slot in range(3):
        prepare(harness, slot, seed=slot)
    reply = harness.draft(
        ingests=[ingest_of(slot) for slot in range(3)], rows=[row_of(slot) for slot in (2, 0, 1)], num_drafts=7
    )
    for row, seed in enumerate((2, 0, 1)):
        alone = draft_one(start(), seed=seed)
        assert reply.token_ids[7 * row : 7 * row + 7] == alone.token_ids
        np.testing.assert_allclose(confidences(reply)[7 * row : 7 * row + 7], confidences(alone), rtol=1e-5)


def test_draft_distributions_are_written_for_rejection_rows_only(start: Run) -> None:
    harness = start()
    harness.draft_probs.rows[:] = np.nan
    for slot, regime in enumerate((Regime.GREEDY, Regime.COUPLED, Regime.REJECTION)):
        prepare(harness, slot, regime)
    reply = harness.draft(
        ingests=[ingest_of(slot) for slot in range(3)], rows=[row_of(slot, round_=9) for slot in range(3)], num_drafts=5
    )
    probs = harness.draft_probs.rows
    told = np.frombuffer(reply.draft_probs, "<f4").reshape(3, 5)
    assert np.isnan(told[:2]).all()
    np.testing.assert_array_equal(told[2], probs[2, np.arange(5), reply.token_ids[10:]])
    assert (told[2] > 0.0).all()
    greedy = harness.draft(rows=[row_of(0, round_=10)], num_drafts=5)
    assert greedy.draft_probs == b""
    assert np.isnan(probs[[0, 1, 3]]).all()
    assert not harness.draft_probs.stamps[[0, 1, 3]].any()
    assert harness.draft_probs.stamps[2].tolist() == [SESSION, 9, 2, CONTEXT + 1]
    np.testing.assert_allclose(probs[2, :5].sum(axis=-1), 1.0, rtol=1e-5)
    assert np.isnan(probs[2, 5:]).all()


def test_rounds_draw_anew_and_a_round_draws_the_same(start: Run) -> None:
    harness = start()
    prepare(harness, 0, Regime.REJECTION)
    harness.draft(ingests=[ingest_of(0)])
    drawn = [tuple(harness.draft(rows=[row_of(0, round_)], num_drafts=7).token_ids) for round_ in (1, 2, 3, 1)]
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) > 1


def test_short_blocks_are_whole_blocks_cut_unless_trained_for(start: Run, tmp_path: Path) -> None:
    whole = draft_one(start())
    cut = draft_one(start(), num_drafts=3)
    assert cut.token_ids == whole.token_ids[:3]
    np.testing.assert_allclose(confidences(cut), confidences(whole)[:3], rtol=1e-5)

    elastic = start(make_checkpoint(tmp_path / "elastic", {"elastic_block_sizes": [3, 7]}))
    short = start(make_checkpoint(tmp_path / "short", {"block_size": 3}))
    np.testing.assert_array_equal(
        confidences(draft_one(elastic, num_drafts=2)), confidences(draft_one(short, num_drafts=2))
    )
    assert not np.allclose(confidences(draft_one(elastic, num_drafts=3)), confidences(whole)[:3], rtol=1e-3)


def test_a_reduced_vocabulary_drafts_target_ids(start: Run, tmp_path: Path) -> None:
    target_ids = np.sort(np.random.default_rng(3).permutation(512)[:100])

    def reduce(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors["d2t"] = target_ids - np.arange(100)
        tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][target_ids]

    whole, reduced = start(), start(make_checkpoint(tmp_path / "reduced", {"draft_vocab_size": 100}, reduce))
    draft_one(whole)
    reply = draft_one(reduced)
    assert set(reply.token_ids) <= set(target_ids.tolist())
    np.testing.assert_allclose(
        reduced.last_forward.base_logits, whole.last_forward.base_logits[..., target_ids], rtol=1e-5, atol=1e-5
    )
    arena = Arena.attach(reduced.info.draft_to_target_arena, session=SESSION)
    np.testing.assert_array_equal(arena.rows, target_ids)
    arena.close()
    assert reduced.draft_probs.spec.shape == (4, 7, 100)
    prepare(reduced, 1, Regime.REJECTION)
    sampled = reduced.draft(ingests=[ingest_of(1)], rows=[row_of(1)], num_drafts=7)
    columns = np.searchsorted(target_ids, sampled.token_ids)
    own = reduced.draft_probs.rows[1, np.arange(7), columns]
    np.testing.assert_array_equal(np.frombuffer(sampled.draft_probs, "<f4"), own)


def test_without_heads_every_confidence_is_one(start: Run, tmp_path: Path) -> None:
    def remove_heads(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(("markov_head", "confidence_head"))]:
            del tensors[name]

    changes = {"markov_rank": 0, "enable_confidence_head": False}
    harness = start(make_checkpoint(tmp_path / "plain", changes, remove_heads))
    reply = draft_one(harness)
    assert confidences(reply).tolist() == [1.0] * 7
    assert list(reply.token_ids) == harness.last_forward.base_logits[0].argmax(-1).tolist()


def test_a_sliding_layer_does_not_see_far_back(start: Run, tmp_path: Path) -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True}
    drafters = {"full": VANILLA_DRAFTER, "sliding": make_checkpoint(tmp_path / "sliding", sliding)}
    differs = {}
    for name, drafter in drafters.items():
        hidden = []
        for far in (0.0, 3.0):
            harness = start(drafter)
            harness.admit(0, Regime.GREEDY, pages=[2, 0, 1])
            near = features(0)
            near[: CONTEXT - 8] += far
            harness.write_features(0, 0, near, step_id=5)
            harness.draft(ingests=[ingest_of(0)], rows=[row_of(0)], num_drafts=7)
            hidden.append(harness.last_forward.hidden)
        differs[name] = not np.allclose(*hidden, rtol=1e-5, atol=1e-5)
    assert differs == {"full": True, "sliding": False}


def test_not_a_number_ends_the_window_of_its_row_alone(start: Run) -> None:
    harness = start()
    prepare(harness, 0)
    prepare(harness, 1, seed=1)
    harness.ring.rows[0, 4] = np.nan
    reply = harness.draft(ingests=[ingest_of(0), ingest_of(1)], rows=[row_of(0), row_of(1)], num_drafts=7)
    assert np.isnan(confidences(reply)[:7]).all()
    assert reply.token_ids[7:] == draft_one(start(), seed=1).token_ids


def test_fp16_weights_stay_close(start: Run) -> None:
    harness = start(weight_format="fp16")
    draft_one(harness)
    exact = start()
    draft_one(exact)
    np.testing.assert_allclose(harness.last_forward.hidden, exact.last_forward.hidden, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_block_lengths_out_of_range_are_refused(start: Run, num_drafts: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"num_draft_tokens must be 1 ... 7, not {num_drafts}"):
        draft_one(start(), num_drafts=num_drafts)


def test_requests_that_do_not_fit_the_session_are_refused(start: Run) -> None:
    harness = start()
    prepare(harness, 0)
    with pytest.raises(InvalidRequestError, match="anchor id 512 is outside the vocabulary of 512"):
        harness.draft(rows=[(0, 512, CONTEXT, 1)], num_drafts=7)
    prepare(harness, 0)
    with pytest.raises(SessionMismatchError, match="slot 0 has no pages for positions 0"):
        harness.draft(rows=[(0, ANCHOR_ID, 49, 1)], num_drafts=7)
    with pytest.raises(InvalidRequestError, match=r"have lengths \[1, 1, 1, 0\], not one"):
        harness.servicer.Draft(
            drafter_pb2.DraftRequest(row_slots=[0], row_anchor_ids=[1], row_anchor_positions=[1], num_draft_tokens=7)
        )


def test_an_empty_call_only_changes_slots(start: Run) -> None:
    harness = start()
    prepare(harness, 0)
    reply = harness.draft()
    assert (len(reply.token_ids), reply.confidences) == (0, b"")
    assert [timing.phase for timing in reply.timings] == ["ingest", "backbone", "head", "total"]
