"""Steps that take their drafts from the drafter's blocks, against steps that are told drafts and lengths."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.v1 import types_pb2

from service_kit.engine_thread import EngineThread
from service_kit.errors import InvalidRequestError, SessionMismatchError, StaleArenaError
from service_kit.handoff import Arena, ArenaSpec
from verifier_service import block_source
from verifier_service.draft_source import DraftArenas
from verifier_service.engine import VerifierEngine
from verifier_service.loading import load_target
from verifier_service.session_memory import SessionSizes
from verifier_service.settings import VerifierSettings
from verifier_service.steps import Acceptance, BlockRows, StepBatch

GOLDEN = Path(__file__).parents[1] / "golden" / "target"
SIZES = SessionSizes(
    num_slots=4,
    num_pages=8,
    max_model_len=32,
    max_batch_tokens=40,
    feature_ring_rows=16,
    max_draft_tokens=4,
    feature_layer_ids=(0, 2),
)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 512, 9)]
ROUND, START = 3, len(PROMPT)


@pytest.fixture(scope="module")
def engine() -> Iterator[VerifierEngine]:
    thread = EngineThread("test-engine")
    settings = VerifierSettings(model=str(GOLDEN), weight_format="float32", kernels="reference", threads=1)
    engine = VerifierEngine(thread.submit(lambda: load_target(settings)).result(), thread)
    yield engine
    engine.close()
    thread.stop()


class Client:
    """Four slots behind the same prompt, two pages each, and the arenas of a drafter."""

    def __init__(self, engine: VerifierEngine, session: int) -> None:
        self.engine, self.session, self.step_id = engine, session, 0
        engine.attach(session, SIZES, DraftArenas())
        self.blocks = Arena.create(ArenaSpec((4, 2, 4), np.float64, 1, session, 1))
        self.probs = Arena.create(ArenaSpec((4, 4, 512), np.float32, 1, session, 1))
        engine.attach(session, SIZES, DraftArenas(self.probs.name, blocks=self.blocks.name))
        updates = types_pb2.SlotUpdates()
        for slot in range(4):
            regime = types_pb2.REGIME_COUPLED if slot == 2 else types_pb2.REGIME_GREEDY
            updates.admissions.add(slot=slot, regime=regime, key=5, temperature=1.0, top_p=1.0)
            for index in range(2):
                updates.page_slots.append(slot)
                updates.page_indices.append(index)
                updates.page_ids.append(slot + 4 * index)
        rows = [(slot, 0, PROMPT, 0) for slot in range(4)]
        self.anchors = self.step(rows, slots=updates).token_ids

    def step(self, rows: list[tuple[int, int, list[int], int]], **changes: Any) -> Acceptance:
        """Rows of slot, start, tokens and number of drafts."""
        self.step_id += 1
        slots, starts, tokens, drafts = zip(*rows, strict=True)
        fields: dict[str, Any] = {
            "session": self.session,
            "epoch": self.engine.epoch,
            "step_id": self.step_id,
            "slots": types_pb2.SlotUpdates(),
            "row_slots": np.array(slots, np.int64),
            "row_starts": np.array(starts, np.int64),
            "row_num_tokens": np.array([len(own) for own in tokens], np.int64),
            "row_num_drafts": np.array(drafts, np.int64),
            "row_emits": np.full(len(rows), True),
            "row_rounds": np.full(len(rows), ROUND, np.int64),
            "token_ids": np.array([token for own in tokens for token in own], np.int64),
        }
        return self.engine.step(StepBatch(**{**fields, **changes})).accepted

    def true_drafts(self, slot: int, count: int = 4) -> list[int]:
        """What the target will emit behind a slot's anchor."""
        text = [self.anchors[slot]]
        while len(text) <= count:
            text += self.step([(slot, START + len(text) - 1, text[-1:], 0)]).token_ids
        return text[1:]

    def publish(self, slot: int, drafts: list[int], survivals: list[float]) -> None:
        self.blocks.rows[slot] = drafts, survivals
        self.blocks.stamps[slot] = (self.session, ROUND, slot, START + 1)

    def anchor_row(self, slot: int) -> tuple[int, int, list[int], int]:
        return (slot, START, [self.anchors[slot]], 0)

    def close(self) -> None:
        self.blocks.close()
        self.probs.close()


SESSIONS = iter(range(900, 999))


@pytest.fixture
def client(engine: VerifierEngine) -> Iterator[Client]:
    client = Client(engine, next(SESSIONS))
    yield client
    client.close()


def blocks_of(rows: list[int], max_drafts: list[int], budget: int, weights: list[float] | None = None) -> BlockRows:
    return BlockRows(np.array(rows), np.array(max_drafts), np.array(weights or [1.0] * len(rows)), budget)


def test_a_step_waits_for_blocks_and_verifies_the_likeliest_drafts(client: Client) -> None:
    drafts = {slot: client.true_drafts(slot) for slot in (0, 2, 3)}
    drafts[3][2] = (drafts[3][2] + 1) % 512
    told = [client.anchor_row(1)]
    for slot, count in ((0, 2), (2, 1), (3, 4)):
        told.append((slot, START, [client.anchors[slot], *drafts[slot][:count]], count))
    expected = client.step(told)
    assert expected.accepted_lens == [0, 2, 1, 2]
    expected_text = client.true_drafts(3, 2)

    survivals = {0: [1.0, 0.5, 0.5, 0.5], 2: [0.5, 0.25, 0.2, 0.0], 3: [0.2, 0.2, 0.2, 0.2]}
    found: list[Acceptance] = []
    # Of three survivals of 0.5 two are verified: the row named first comes first.
    blocks = blocks_of([3, 1, 2], [4, 4, 4], budget=7, weights=[5.0, 1.0, 1.0])
    step = threading.Thread(
        target=lambda: found.append(client.step([client.anchor_row(slot) for slot in (1, 0, 2, 3)], blocks=blocks))
    )
    step.start()
    for slot in (2, 0, 3):
        time.sleep(0.01)
        assert not found
        client.publish(slot, drafts[slot], survivals[slot])
    step.join(20)
    assert (found[0].verify_lens, found[0].accepted_lens) == ([0, 2, 1, 4], expected.accepted_lens)
    assert (found[0].token_ids, found[0].failures) == (expected.token_ids, [])
    assert found[0].emissions == expected.emissions
    assert client.true_drafts(3, 2) == expected_text


def test_a_row_whose_block_does_not_come_fails_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_source, "_TIMEOUT_S", 0.0)
    client.publish(0, client.true_drafts(0), [1.0] * 4)
    client.publish(2, [9] * 4, [1.0] * 4)
    client.blocks.stamps[2, 1] = ROUND - 1
    result = client.step([client.anchor_row(slot) for slot in (2, 0)], blocks=blocks_of([0, 1], [4, 2], budget=2))
    assert [failure.row for failure in result.failures] == [0]
    assert "block of slot 2, round 3 and position 10 did not come" in result.failures[0].reason
    assert (result.verify_lens, result.accepted_lens, len(result.token_ids)) == ([0, 2], [0, 2], 3)


def test_the_end_of_the_session_ends_the_wait(client: Client) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            client.step([client.anchor_row(0)], blocks=blocks_of([0], [4], budget=4))
        except Exception as error:
            errors.append(error)

    step = threading.Thread(target=run)
    step.start()
    client.engine.attach(next(SESSIONS), SIZES, DraftArenas())
    step.join(20)
    assert isinstance(errors[0], SessionMismatchError)


@pytest.mark.parametrize(
    ("blocks", "changes", "field"),
    [
        (blocks_of([0, 0], [1, 1], 1), {}, "block_rows"),
        (blocks_of([2], [1], 1), {}, "block_rows"),
        (BlockRows(np.array([0]), np.array([1, 1]), np.ones(1), 1), {}, "block_rows"),
        (blocks_of([0], [1], 1), {"row_emits": np.array([False, True])}, "block_rows"),
        (blocks_of([0], [1], 1), {"row_chained": np.array([True, False])}, "block_rows"),
        (blocks_of([0], [1], 1), {"row_masked": np.array([True, False])}, "block_rows"),
        (blocks_of([0], [1], 1), {"row_num_drafts": np.array([0, 1])}, "row_num_drafts"),
        (blocks_of([0], [0], 1), {}, "block_max_drafts"),
        (blocks_of([0], [5], 1), {}, "block_max_drafts"),
        (blocks_of([0], [1], 1, [0.0]), {}, "block_weights"),
        (blocks_of([0], [1], 1), {"row_slots": np.array([0, 9])}, "row_slots"),
        (blocks_of([0], [1], 1), {"row_rounds": np.array([1])}, "row_rounds"),
    ],
)
def test_impossible_blocks_are_refused(client: Client, blocks: BlockRows, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        client.step([client.anchor_row(0), client.anchor_row(1)], blocks=blocks, **changes)
    assert raised.value.field == field


def test_a_block_needs_pages_for_all_of_its_drafts(client: Client) -> None:
    client.publish(0, [1] * 4, [1.0] * 4)
    client.blocks.stamps[0, -1] = 30
    with pytest.raises(SessionMismatchError, match="page"):
        client.step([(0, 29, [1], 0)], blocks=blocks_of([0], [4], budget=0), row_rounds=np.array([ROUND]))


def test_blocks_of_another_shape_are_refused(engine: VerifierEngine) -> None:
    client = Client(engine, next(SESSIONS))
    for shape, dtype in (((4, 2, 3), np.float64), ((4, 1, 4), np.float64), ((4, 2, 4), np.float32)):
        arena = Arena.create(ArenaSpec(shape, dtype, 1, client.session, 1))
        probs = Arena.create(ArenaSpec((4, 4, 512), np.float32, 1, client.session, 1))
        with pytest.raises(StaleArenaError, match=r"blocks are \[4, ., .\]"):
            engine.attach(client.session, SIZES, DraftArenas(probs.name, blocks=arena.name))
        arena.close()
        probs.close()
    client.close()
