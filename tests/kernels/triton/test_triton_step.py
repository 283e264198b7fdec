"""Steps captured whole, with all that rows may ask for, against the reference engine: one step after the other through
the same graphs.

Greedy and coupled tokens, ranks and likeliest tokens are equal, log-probabilities and probabilities within 1e-4: the
forwards differ by the rounding of single precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from dspark.v1 import types_pb2

from kernels.sampling import LogitControls, Regime
from service_kit.engine_thread import EngineThread
from service_kit.gpu import GpuFacts, choose_device
from service_kit.graphs import geometries, widest
from service_kit.handoff import Arena, ArenaSpec
from tests.fakes.gpu import FakeGraphRunner, fake_gpu
from tests.tiny_target import TARGET
from verifier_service.draft_source import DraftArenas
from verifier_service.engine import VerifierEngine
from verifier_service.loading import load_target
from verifier_service.session_memory import SessionSizes
from verifier_service.settings import VerifierSettings
from verifier_service.steps import Acceptance, BlockRows, StepBatch

# Rows of nobody compute with what their memory holds.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

SLOTS, DRAFTS, VOCAB, PAGES = 5, 2, 512, 2
SIZES = SessionSizes(SLOTS, SLOTS * PAGES, 16 * PAGES, 24, 0, DRAFTS, ())
WORDS, ROUND = VOCAB // 32, 4
TOLERANCE = 1e-4
PROMPTS = [[int(token) for token in np.random.default_rng(slot).integers(0, VOCAB, 3)] for slot in range(SLOTS)]
NEUTRAL = LogitControls()
CONTROLLED = LogitControls(
    1.3, 0.4, 0.6, bias=((7, 4.0), (221, -100.0)), banned_sequences=((9,), (480, 480), (3, 4, 5)), min_tokens=40,
    stop_token_ids=tuple(range(100)),
)  # fmt: skip
REWARDED = LogitControls(0.5, -2.0, -2.0, banned_sequences=((261, 261, 261), (427, 427, 427), (427, 5)))
"""Tokens come again and again, as often as their bans let them: the text follows all that was counted."""
Row = tuple[int, list[int], list[int]]
"""Slot, text up to the anchor, drafts."""


def masks_of(slot: int, position: int) -> npt.NDArray[np.uint32]:
    """A quarter of the tokens, others at every position."""
    masks = np.random.default_rng([slot, position, 1]).integers(0, 2**32, (2, DRAFTS + 1, WORDS), np.uint32)
    return masks[0] & masks[1]


class Engine:
    """A session of one engine, with the arenas of a drafter and of a scheduler."""

    def __init__(self, gpu: Any, session: int) -> None:
        self.thread, self.session, self.step_id, self.gpu = EngineThread("test-engine"), session, 0, gpu
        common = {"model": str(TARGET), "weight_format": "float32", "threads": 1}
        choice = {"kernels": "reference"} if gpu is None else {"device": "cuda"}
        facts = GpuFacts("a GPU that is not there", (9, 0), True, 2**34, 2**34)
        with (
            mock.patch("verifier_service.loading.open_gpu", return_value=gpu),
            mock.patch.object(choose_device, "__defaults__", (lambda: facts,)),
        ):
            loading = self.thread.submit(lambda: load_target(VerifierSettings(**common, **choice)))  # type: ignore[arg-type]
            self.engine = VerifierEngine(loading.result(), self.thread)
        self.probs, self.draft_probs = self.arena((SLOTS, DRAFTS, VOCAB), torch.float32)
        self.blocks, self.drafts = self.arena((SLOTS, 2, DRAFTS), torch.float64)
        self.masks = Arena.create(ArenaSpec((SLOTS, DRAFTS + 1, WORDS), np.uint32, 1, session, 1))
        drafter = DraftArenas(self.probs.name, blocks=self.blocks.name)
        self.epoch = self.engine.attach(session, SIZES, drafter, self.masks.name).epoch

    def arena(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Arena, npt.NDArray[Any]]:
        """A drafter's arena where the engine computes, and its rows."""
        kind, memory = torch.empty(0, dtype=dtype).numpy().dtype, self.gpu.memory if self.gpu else None
        arena = Arena.create(ArenaSpec(shape, kind, 1, self.session, 1, is_on_device=memory is not None), memory)
        return arena, arena.device_rows(dtype)[:-1].view(shape).numpy() if memory else arena.rows

    def close(self) -> None:
        self.engine.close()
        self.thread.stop()
        for arena in (self.probs, self.blocks, self.masks):
            arena.close()


class Pair:
    """The same steps of both engines."""

    def __init__(self) -> None:
        self.gpu = fake_gpu(refuses_reads=False)
        self.engines = [Engine(None, 1), Engine(self.gpu, 2)]
        self.updates = types_pb2.SlotUpdates()

    @property
    def runner(self) -> FakeGraphRunner:
        runner = self.gpu.runner
        assert isinstance(runner, FakeGraphRunner)
        return runner

    def admit(self, slot: int, regime: Regime, controls: LogitControls = NEUTRAL, **asked: Any) -> None:
        """`asked`: the text if it is not the prompt, and fields of the wire."""
        text = asked.pop("text", PROMPTS[slot])
        scores = {name: asked.pop(name) for name in ("num_logprobs", "num_prompt_logprobs") if name in asked}
        target = types_pb2.TargetOptions(
            repetition_penalty=controls.repetition_penalty,
            frequency_penalty=controls.frequency_penalty,
            presence_penalty=controls.presence_penalty,
            bias_token_ids=[token_id for token_id, _ in controls.bias],
            bias_values=[value for _, value in controls.bias],
            banned_sequences=[types_pb2.TokenSequence(token_ids=each) for each in controls.banned_sequences],
            min_tokens=controls.min_tokens,
            stop_token_ids=controls.stop_token_ids,
            text_token_ids=text,
            num_prompt_tokens=len(PROMPTS[slot]),
            **scores,
        )
        values = {"temperature": 1.0, "top_p": 1.0, "key": 2**63 + slot, **asked}
        wire = types_pb2.Regime.ValueType(regime)
        self.updates.admissions.append(types_pb2.SlotAdmission(slot=slot, regime=wire, target=target, **values))
        for index in range(PAGES):
            self.updates.page_slots.append(slot)
            self.updates.page_indices.append(index)
            self.updates.page_ids.append(slot * PAGES + index)

    def step(
        self,
        *rows: Row,
        masked: tuple[int, ...] = (),
        asks: Any = (),
        blocks: dict[int, list[tuple[int, float]]] | None = None,
        is_ahead: bool = False,
        **stamp: int,
    ) -> list[Acceptance]:
        """Rows with draft distributions, those of `masked` slots under masks; both are functions of slot and position.

        `blocks`: drafts and their survivals by row, of which three are verified. `is_ahead`: of the reference alone.
        `stamp`: another position of the masks.
        """
        found = []
        is_new = [len(text) == len(PROMPTS[slot]) for slot, text, _ in rows]  # computed from the prompt's start
        tokens = [[*(text if new else text[-1:]), *drafts] for (_, text, drafts), new in zip(rows, is_new, strict=True)]
        starts = [0 if new else len(text) - 1 for (_, text, _), new in zip(rows, is_new, strict=True)]
        slots = np.array([slot for slot, _, _ in rows])
        for each in self.engines[: 1 if is_ahead else 2]:
            each.step_id += 1
            for slot, text, _ in rows:
                rng = np.random.default_rng([slot, len(text)])
                each.draft_probs[slot] = rng.dirichlet(np.full(VOCAB, 0.2), DRAFTS)
                each.masks.rows[slot] = masks_of(slot, len(text))
                each.probs.stamps[slot] = each.blocks.stamps[slot] = each.session, ROUND, slot, len(text)
                each.masks.stamps[slot] = each.session, each.step_id, slot, stamp.get("position", len(text))
            for row, block in (blocks or {}).items():
                each.drafts[slots[row]] = np.array(block).T
            batch = StepBatch(
                each.session,
                each.epoch,
                each.step_id,
                self.updates,
                row_slots=slots,
                row_starts=np.array(starts),
                row_num_tokens=np.array([len(own) for own in tokens]),
                row_num_drafts=np.array([len(drafts) for _, _, drafts in rows]),
                row_emits=np.full(len(rows), True),
                row_rounds=np.full(len(rows), ROUND),
                token_ids=np.array([token for own in tokens for token in own]),
                row_masked=np.isin(slots, masked),
                prob_asks=np.array(asks, np.int64).reshape(-1, 3),
                blocks=BlockRows(np.array([*blocks]), np.full(len(blocks), DRAFTS), np.ones(len(blocks)), 3)
                if blocks
                else None,
            )
            found.append(each.engine.step(batch).accepted)
        if not is_ahead:
            self.updates = types_pb2.SlotUpdates()
        return found

    def ahead(self, *rows: Row, masked: tuple[int, ...] = ()) -> list[int]:
        """The first token that each row will emit, if its drafts do not matter."""
        return self.step(*rows, masked=masked, is_ahead=True)[0].token_ids

    def compare(self, *rows: Row, **changes: Any) -> list[list[int]]:
        """A step in which both engines agree; the tokens of every row."""
        num_replayed = self.runner.num_replayed
        expected, found = self.step(*rows, **changes)
        assert self.runner.num_replayed == num_replayed + (2 if "blocks" in changes else 1)
        assert found.failures == expected.failures == []
        assert found.verify_lens == expected.verify_lens
        assert found.token_ids == expected.token_ids
        assert found.accepted_lens == expected.accepted_lens
        assert found.scores.keys() == expected.scores.keys()
        for row, scores in expected.scores.items():
            for own, wanted in zip(found.scores[row], scores, strict=True):
                assert (own.rank, own.top_ids) == (wanted.rank, wanted.top_ids)
                probs = [own.logprob, *own.top_logprobs], [wanted.logprob, *wanted.top_logprobs]
                np.testing.assert_allclose(*probs, atol=TOLERANCE)
        np.testing.assert_allclose(found.target_probs, expected.target_probs, rtol=TOLERANCE, atol=1e-7)
        ends = np.cumsum(np.array(found.accepted_lens) + 1)
        return [own.tolist() for own in np.split(np.array(found.token_ids), ends[:-1])]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for engine in pair.engines:
        engine.close()


def test_rows_of_every_kind_share_a_step_and_nothing_is_left_for_the_next(pair: Pair) -> None:
    pair.admit(0, Regime.GREEDY)
    pair.admit(1, Regime.GREEDY, CONTROLLED, num_logprobs=0)
    pair.admit(2, Regime.COUPLED, top_p=0.9, min_p=0.01, num_logprobs=5)
    pair.admit(3, Regime.REJECTION, CONTROLLED, temperature=1.5, top_k=40)
    pair.admit(4, Regime.REJECTION, temperature=1.5)
    texts = [list(prompt) for prompt in PROMPTS]
    for slot, emitted in enumerate(pair.compare(*((slot, texts[slot], []) for slot in range(SLOTS)), masked=(2, 3))):
        texts[slot] += emitted
    accepted = set()
    for masked in ((1, 2), (0, 3)):
        right = pair.ahead(*((slot, texts[slot], []) for slot in range(SLOTS)), masked=masked)
        rows: list[Row] = [(slot, texts[slot], [right[slot], 17 + slot][slot % 2 :]) for slot in range(SLOTS)]
        asks = [
            (slot, len(texts[slot]) + k, token) for slot in (3, 4, 0) for k in range(2) for token in (9, right[slot])
        ]
        for slot, emitted in enumerate(pair.compare(*rows, masked=masked, asks=asks)):
            accepted.add(len(emitted))
            texts[slot] += emitted
        # Each row in the place of another, and of all that they had only the controls and scores of one.
        places = (4, 0, 2)
        for slot, emitted in zip(places, pair.compare(*((slot, texts[slot], []) for slot in places)), strict=True):
            texts[slot] += emitted
    assert accepted == {1, 2, 3}
    assert pair.compare((4, texts[4], []), (0, texts[0], []))  # nothing but plain rows: another graph
    shape = SIZES.max_batch_tokens, SLOTS
    assert pair.runner.num_recorded == len(geometries(*shape)) + len(widest(*shape)) + 1  # the last settles lengths


@pytest.mark.parametrize("regime", [Regime.GREEDY, Regime.COUPLED])
def test_controlled_text_whatever_is_drafted_cut_or_taken_again(pair: Pair, regime: Regime) -> None:
    """Drafts are right up to some place; what is committed may be less than was emitted."""
    text, outcomes = list(PROMPTS[0]), set()
    pair.admit(0, regime, REWARDED)
    text += pair.compare((0, text, []))[0]
    for turn in range(5):
        (first,) = pair.ahead((0, text, []))
        (second,) = pair.ahead((0, [*text, first], []))
        (emitted,) = pair.compare((0, text, ([first, second], [first, 3], [4])[turn % 3]))
        outcomes.add(len(emitted))
        text += emitted[: max(1, len(emitted) - turn % 2)]
        if turn == 3:
            pair.admit(0, regime, REWARDED, text=text)
    assert outcomes == {1, 2, 3}


def test_controls_give_way_where_they_leave_nothing(pair: Pair) -> None:
    """Of two rows under masks, with all tokens banned for the first but those that its mask forbids anyway."""
    allowed = np.unpackbits(masks_of(0, len(PROMPTS[0])).view(np.uint8), axis=1, bitorder="little")[0]
    banned = LogitControls(banned_sequences=tuple((token,) for token in np.flatnonzero(allowed).tolist()))
    pair.admit(0, Regime.GREEDY, banned)
    pair.admit(1, Regime.GREEDY, banned)
    (first,), (second,) = pair.compare((0, PROMPTS[0], []), (1, PROMPTS[1], []), masked=(0, 1))
    assert allowed[first]
    assert not allowed[second]


def test_lengths_are_settled_on_the_device_beside_controls_masks_and_scores(pair: Pair) -> None:
    pair.admit(0, Regime.GREEDY, CONTROLLED, num_logprobs=3)
    pair.admit(1, Regime.GREEDY)
    pair.admit(2, Regime.GREEDY, CONTROLLED)
    texts = [list(prompt) for prompt in PROMPTS]
    for slot, emitted in enumerate(pair.compare(*((slot, texts[slot], []) for slot in range(3)), masked=(2,))):
        texts[slot] += emitted
    outcomes = set()
    for survivals in ((0.9, 0.8, 0.3, 0.1), (0.2, 0.1, 0.9, 0.5), (0.9, 0.2, 0.8, 0.7)):
        rows: list[Row] = [(slot, texts[slot], []) for slot in range(3)]
        right = pair.ahead(*rows, masked=(2,))
        blocks = {0: [(right[0], survivals[0]), (4, survivals[1])], 1: [(right[1], survivals[2]), (4, survivals[3])]}
        for slot, emitted in enumerate(pair.compare(*rows, masked=(2,), blocks=blocks)):
            outcomes.add(len(emitted))
            texts[slot] += emitted
    assert outcomes == {1, 2}


def test_a_row_that_cannot_be_served_fails_alone(pair: Pair) -> None:
    pair.admit(0, Regime.GREEDY)
    pair.admit(1, Regime.GREEDY, CONTROLLED, text=[1])
    pair.admit(2, Regime.GREEDY)
    rows: list[Row] = [(slot, PROMPTS[slot], []) for slot in range(3)]
    expected, found = pair.step(*rows, masked=(2,), position=77)
    assert [failure.row for failure in found.failures] == [failure.row for failure in expected.failures] == [1, 2]
    assert found.failures[0].reason == expected.failures[0].reason
    assert "masks of slot 2 carry (session, step, slot, position) (2, 1, 2, 77)" in found.failures[1].reason
    assert found.token_ids == expected.token_ids

    pair.admit(1, Regime.GREEDY, LogitControls(banned_sequences=(tuple(range(65)),)))
    pair.admit(2, Regime.GREEDY, num_logprobs=21)
    _, found = pair.step(*rows, asks=[(0, 3, token) for token in range(10)])
    reasons = [failure.reason for failure in found.failures]
    assert "10 probabilities are more than the 9" in reasons[0]
    assert "room for 256 sequences of 64 tokens" in reasons[1]
    assert "21 likeliest tokens are more than the 20" in reasons[2]
