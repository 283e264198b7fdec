"""The verifier's engine on the golden target: steps, acceptance, the feature ring, sessions and their failures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark.v1 import types_pb2
from transformers import AutoModelForCausalLM

from kernels.sampling import Regime, SlotSampling
from kernels.target_probs.reference import target_probs
from service_kit.engine_thread import EngineThread
from service_kit.errors import ConfigurationError, InvalidRequestError, SessionMismatchError, StaleArenaError
from service_kit.handoff import Arena, ArenaSpec
from verifier_service.draft_source import DraftArenas
from verifier_service.engine import VerifierEngine
from verifier_service.loading import load_target
from verifier_service.session_memory import SessionSizes
from verifier_service.settings import VerifierSettings
from verifier_service.steps import StepBatch, StepResult

GOLDEN = Path(__file__).parents[1] / "golden" / "target"
SIZES = SessionSizes(
    num_slots=3,
    num_pages=12,
    max_model_len=64,
    max_batch_tokens=64,
    feature_ring_rows=24,
    max_draft_tokens=4,
    feature_layer_ids=(0, 2),
)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 512, 21)]
SESSIONS = itertools.count(77)
NUM_NEW = 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierEngine]:
    thread = EngineThread("test-engine")
    settings = VerifierSettings(model=str(GOLDEN), weight_format="float32", kernels="reference", threads=1)
    target = thread.submit(lambda: load_target(settings)).result()
    engine = VerifierEngine(target, thread)
    yield engine
    engine.close()
    thread.stop()


@pytest.fixture(scope="module")
def greedy_text() -> list[int]:
    """Greedy continuation of PROMPT by `transformers`."""
    reference = AutoModelForCausalLM.from_pretrained(GOLDEN, local_files_only=True).eval()
    tokens = list(PROMPT)
    with torch.no_grad():
        while len(tokens) < len(PROMPT) + NUM_NEW + 8:
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


class Client:
    """A small scheduler: slot s owns pages s, s + num_slots, …"""

    def __init__(self, engine: VerifierEngine, sizes: SessionSizes = SIZES) -> None:
        self.engine, self.session, self.sizes = engine, next(SESSIONS), sizes
        self.step_id = 0
        self.updates = types_pb2.SlotUpdates()
        self.attachment = engine.attach(self.session, sizes, DraftArenas())

    def admit(self, slot: int, regime: Regime = Regime.GREEDY, key: int = 5, **sampling: float) -> None:
        values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, **sampling}
        wire_regime = types_pb2.Regime.ValueType(regime)
        self.updates.admissions.append(types_pb2.SlotAdmission(slot=slot, regime=wire_regime, key=key, **values))
        for index in range(self.sizes.num_pages // self.sizes.num_slots):
            self.updates.page_slots.append(slot)
            self.updates.page_indices.append(index)
            self.updates.page_ids.append(slot + index * self.sizes.num_slots)

    def batch(self, *rows: tuple[int, int, list[int], int, bool], round_: int = 1, **changes: Any) -> StepBatch:
        """A step of (slot, start, tokens, number of drafts, emits) rows."""
        self.step_id += 1
        slots, starts, tokens, drafts, emits = zip(*rows, strict=True)
        fields: dict[str, Any] = {
            "session": self.session,
            "epoch": self.attachment.epoch,
            "step_id": self.step_id,
            "slots": self.updates,
            "row_slots": np.array(slots, np.int64),
            "row_starts": np.array(starts, np.int64),
            "row_num_tokens": np.array([len(own) for own in tokens], np.int64),
            "row_num_drafts": np.array(drafts, np.int64),
            "row_emits": np.array(emits),
            "row_rounds": np.full(len(rows), round_, np.int64),
            "token_ids": np.array([token for own in tokens for token in own], np.int64),
            **changes,
        }
        self.updates = types_pb2.SlotUpdates()
        return StepBatch(**fields)

    def step(self, *rows: tuple[int, int, list[int], int, bool], round_: int = 1, **changes: Any) -> StepResult:
        return self.engine.step(self.batch(*rows, round_=round_, **changes))

    def chained(self, *rows: tuple[int, int]) -> StepResult:
        """A step of (slot, start) rows whose token is the one their slot emitted in the step before."""
        return self.step(*((slot, start, [0], 0, True) for slot, start in rows), row_chained=np.full(len(rows), True))

    def generate(self, slot: int, draft_after: Any = None) -> list[int]:
        """Tokens after PROMPT; `draft_after(generated)` gives the drafts to verify."""
        self.step((slot, 0, PROMPT[:10], 0, False))
        text = list(self.step((slot, 10, PROMPT[10:], 0, True)).accepted.token_ids)
        while len(text) < NUM_NEW:
            drafts = draft_after(text) if draft_after else []
            start = len(PROMPT) + len(text) - 1
            accepted = self.step((slot, start, [text[-1], *drafts], len(drafts), True)).accepted
            assert accepted.verify_lens == [len(drafts)]
            assert accepted.token_ids[:-1] == drafts[: accepted.accepted_lens[0]]
            text += accepted.token_ids
        return text[:NUM_NEW]


def test_greedy_decoding_equals_transformers(engine: VerifierEngine, greedy_text: list[int]) -> None:
    client = Client(engine)
    client.admit(1)
    assert client.generate(1) == greedy_text[:NUM_NEW]


def test_greedy_text_is_the_same_for_any_drafts(engine: VerifierEngine, greedy_text: list[int]) -> None:
    client = Client(engine)
    accepted: list[int] = []

    def draft_after(text: list[int]) -> list[int]:
        drafts = greedy_text[len(text) : len(text) + 4]
        wrong_from = len(text) % 5
        accepted.append(wrong_from)
        return [token if index < wrong_from else (token + 1) % 512 for index, token in enumerate(drafts)]

    client.admit(0)
    assert client.generate(0, draft_after) == greedy_text[:NUM_NEW]
    assert len(set(accepted)) > 2  # windows of different outcomes were seen


def test_rows_of_a_batch_keep_to_themselves(engine: VerifierEngine, greedy_text: list[int]) -> None:
    """A verify row, a prefill chunk and a last chunk in one step."""
    client = Client(engine)
    for slot in range(3):
        client.admit(slot)
    anchor = client.step((0, 0, PROMPT, 0, True), (2, 0, PROMPT[:7], 0, False)).accepted
    assert (anchor.token_ids, anchor.verify_lens) == (greedy_text[:1], [0, 0])
    drafts = [*greedy_text[1:3], (greedy_text[3] + 1) % 512]
    result = client.step(
        (1, 0, PROMPT[:12], 0, False),
        (0, len(PROMPT), [greedy_text[0], *drafts], 3, True),
        (2, 7, PROMPT[7:], 0, True),
    ).accepted
    assert result.verify_lens == [0, 3, 0]
    assert result.accepted_lens == [0, 2, 0]
    assert result.token_ids == [*greedy_text[1:4], greedy_text[0]]
    assert result.failures == []


def test_coupled_text_does_not_depend_on_drafts(engine: VerifierEngine, greedy_text: list[int]) -> None:
    client = Client(engine)
    client.admit(0, Regime.COUPLED, key=9, temperature=0.8)
    client.admit(1, Regime.COUPLED, key=9, temperature=0.8)
    client.admit(2, Regime.COUPLED, key=10, temperature=0.8)
    plain = client.generate(0)
    helped = client.generate(1, lambda text: [*plain[len(text) : len(text) + 2], 3])
    assert helped == plain
    assert plain != greedy_text[:NUM_NEW]
    assert client.generate(2) != plain


def test_repeated_steps_are_answered_once(engine: VerifierEngine) -> None:
    client = Client(engine)
    client.admit(0)
    batch = client.batch((0, 0, PROMPT, 0, True))
    first = engine.step(batch)
    assert engine.step(batch) is first
    follow = client.step((0, len(PROMPT), first.accepted.token_ids, 0, True))
    assert engine.step(batch) is first  # two may have been in flight when a connection broke
    client.step((0, len(PROMPT) + 1, follow.accepted.token_ids, 0, True))
    with pytest.raises(SessionMismatchError, match="older"):
        engine.step(batch)
    assert engine.step(client.batch((0, 0, [1], 0, True), step_id=2)) is follow


@pytest.mark.parametrize("changes", [{"session": 1}, {"epoch": 1}])
def test_steps_of_another_session_or_epoch_are_refused(engine: VerifierEngine, changes: dict[str, int]) -> None:
    client = Client(engine)
    client.admit(0)
    with pytest.raises(SessionMismatchError, match="attach first"):
        engine.step(client.batch((0, 0, PROMPT, 0, True), **changes))


def test_refused_rows_leave_the_session_usable(engine: VerifierEngine, greedy_text: list[int]) -> None:
    client = Client(engine)
    client.admit(0)
    with pytest.raises(InvalidRequestError, match=r"1 \.\.\. 24 tokens"):  # more than the feature ring holds
        client.step((0, 0, [1] * 25, 0, False))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary of 512"):
        client.step((0, 0, [512], 0, True))
    assert client.step((0, 0, PROMPT, 0, True)).accepted.token_ids == greedy_text[:1]


def test_unusable_logits_fail_their_row_only(engine: VerifierEngine, greedy_text: list[int]) -> None:
    client = Client(engine)
    client.admit(0)
    client.admit(1)
    client.step((0, 0, PROMPT[:4], 0, False), (1, 0, PROMPT[:4], 0, False))
    assert engine._session is not None
    with torch.inference_mode():
        engine._session.space.values[1][0] = torch.nan  # page 0 belongs to slot 0
    result = client.step((0, 4, PROMPT[4:], 0, True), (1, 4, PROMPT[4:], 0, True)).accepted
    assert [(row, "not finite" in reason) for row, reason in result.failures] == [(0, True)]
    assert result.token_ids == greedy_text[:1]


@pytest.mark.parametrize("regime", [Regime.GREEDY, Regime.COUPLED, Regime.REJECTION])
def test_chained_steps_give_the_same_text(engine: VerifierEngine, regime: Regime) -> None:
    client = Client(engine)
    for slot in (0, 1):
        client.admit(slot, regime)
    plain = client.generate(0)
    text = list(client.step((1, 0, PROMPT, 0, True)).accepted.token_ids)
    while len(text) < NUM_NEW:
        text += client.chained((1, len(PROMPT) + len(text) - 1)).accepted.token_ids
    assert text == plain


def test_a_chained_row_without_its_token_fails_alone(engine: VerifierEngine, greedy_text: list[int]) -> None:
    client = Client(engine)
    client.admit(0)
    client.admit(1)
    client.step((0, 0, PROMPT, 0, True), (1, 0, PROMPT[:4], 0, False))
    result = client.chained((1, 4), (0, len(PROMPT))).accepted
    assert [(row, "emitted no token for position 4" in reason) for row, reason in result.failures] == [(0, True)]
    assert result.token_ids == greedy_text[1:2]
    client.step((1, 4, PROMPT[4:], 0, True))  # slot 0 rests: what it emitted is no longer known
    result = client.chained((1, len(PROMPT)), (0, len(PROMPT) + 1)).accepted
    assert [row for row, _ in result.failures] == [1]
    assert result.token_ids == greedy_text[1:2], "what ran in vain left a trace in another slot or its own"
    assert client.step((0, len(PROMPT) + 1, greedy_text[1:2], 0, True)).accepted.token_ids == greedy_text[2:3]


def test_features_of_computed_rows_reach_the_ring(engine: VerifierEngine) -> None:
    client = Client(engine)
    ring = Arena.attach(client.attachment.features_arena, session=client.session)
    ring.rows.fill(np.nan)
    client.admit(2)
    tokens = (PROMPT * 2)[:40]
    for first in range(0, 40, 20):
        client.step((2, first, tokens[first : first + 20], 0, False))
    reference = AutoModelForCausalLM.from_pretrained(GOLDEN, local_files_only=True).eval()
    with torch.no_grad():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat((states[1][0], states[3][0]), dim=-1)
    for position in range(16, 40):
        place = position % SIZES.feature_ring_rows
        assert ring.stamps[2, place].tolist() == [client.session, 1 if position < 20 else 2, 2, position]
        torch.testing.assert_close(torch.from_numpy(ring.rows[2, place]), expected[position], rtol=1e-3, atol=1e-3)
    assert np.isnan(ring.rows[:2]).all()
    assert not ring.stamps[:2].any()
    ring.close()


class FakeDrafter:
    """Owner of draft distribution arenas over a draft vocabulary of the last 16 target tokens."""

    def __init__(self, session: int, vocab_size: int = 16) -> None:
        shape = (SIZES.num_slots, SIZES.max_draft_tokens, vocab_size)
        self.probs = Arena.create(ArenaSpec(shape, np.float32, 1, session, 1))
        self.mapping = Arena.create(ArenaSpec((vocab_size,), np.uint32, 0, session, 1))
        self.mapping.rows[:] = 512 - vocab_size + np.arange(vocab_size)
        self.names = DraftArenas(self.probs.name, self.mapping.name)

    def close(self) -> None:
        self.probs.close()
        self.mapping.close()


def test_rejection_rows_use_their_own_rounds_distributions(engine: VerifierEngine) -> None:
    client = Client(engine)
    drafter = FakeDrafter(client.session)
    engine.attach(client.session, SIZES, drafter.names)
    engine.attach(client.session, SIZES, drafter.names)  # repeated: the names are gone, the mapping stays
    client.admit(0, Regime.REJECTION, key=1)
    client.admit(1, Regime.REJECTION, key=2)
    anchors = client.step((0, 0, PROMPT, 0, True), (1, 0, PROMPT, 0, True)).accepted.token_ids
    start = len(PROMPT)
    for slot in (0, 1):
        drafter.probs.rows[slot] = 1 / 16
        drafter.probs.stamps[slot] = (client.session, 4, slot, start + 1)
    drafter.probs.stamps[1, 1] = 3  # the round before
    rows = [(slot, start, [anchors[slot], 500, 501], 2, True) for slot in (0, 1)]
    result = client.step(*rows, round_=4).accepted
    assert [row for row, _ in result.failures] == [1]
    assert "draft_probs of slot 1 carry" in result.failures[0].reason
    assert len(result.token_ids) == result.accepted_lens[0] + 1
    assert result.accepted_lens[1] == result.verify_lens[1] == 0
    for stamp in ((0, 4, 1, start + 1), (client.session, 4, 0, start + 1), (client.session, 4, 1, start)):
        drafter.probs.stamps[1] = stamp
        assert [row for row, _ in client.step(*rows, round_=4).accepted.failures] == [1]
    drafter.close()


def test_a_certain_draft_distribution_is_accepted_as_often_as_the_target_says(engine: VerifierEngine) -> None:
    """Drafts equal to the target's own certainty are kept; drafts the target excludes never are."""
    client = Client(engine)
    drafter = FakeDrafter(client.session, vocab_size=512)
    engine.attach(client.session, SIZES, drafter.names)
    client.admit(0, Regime.REJECTION, key=1, top_k=1)
    start = len(PROMPT)
    anchor = client.step((0, 0, PROMPT, 0, True)).accepted.token_ids
    best = client.step((0, start, anchor, 0, True)).accepted.token_ids[0]
    for draft, accepted_len in ((best, 1), ((best + 1) % 512, 0)):
        drafter.probs.rows[0] = 0
        drafter.probs.rows[0, 0, draft] = 1
        drafter.probs.stamps[0] = (client.session, 1, 0, start + 1)
        result = client.step((0, start, [*anchor, draft], 1, True)).accepted
        assert (result.accepted_lens, result.token_ids[0]) == ([accepted_len], best)
    drafter.close()


def test_target_probabilities_are_told_where_a_rejection_row_emits(engine: VerifierEngine) -> None:
    client = Client(engine)
    drafter = FakeDrafter(client.session, vocab_size=512)
    engine.attach(client.session, SIZES, drafter.names)
    client.admit(0, Regime.REJECTION, temperature=0.7, top_k=5)
    client.admit(1, Regime.COUPLED)
    anchor = client.step((0, 0, PROMPT, 0, True), (1, 0, PROMPT, 0, True)).accepted.token_ids[:1]
    start = len(PROMPT)
    reference = AutoModelForCausalLM.from_pretrained(GOLDEN, local_files_only=True).eval()
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT, *anchor]])).logits[0, -1:].numpy()
    expected = target_probs(logits, SlotSampling(Regime.REJECTION, temperature=0.7, top_k=5))[0]
    best, banned = int(expected.argmax()), int(expected.argmin())
    # The target cannot emit the second draft: what is behind it was never emitted.
    for k, draft in enumerate((best, banned, 9)):
        drafter.probs.rows[0, k] = 0
        drafter.probs.rows[0, k, draft] = 1 if k else 1e-3
        drafter.probs.rows[0, k, (draft + 1) % 512] += 0 if k else 1 - 1e-3
    drafter.probs.stamps[0] = (client.session, 1, 0, start + 1)
    asks = [(0, start + 1, best), (0, start + 1, banned), (0, start + 2, banned), (0, start + 3, 9), (0, start, best)]
    asks += [(0, start + 9, best), (1, start + 1, best)]
    rows = [(0, start, [*anchor, best, banned, 9], 3, True), (1, start, [7], 0, True)]
    result = client.step(*rows, prob_asks=np.array(asks)).accepted
    assert result.accepted_lens[0] == 1
    assert result.target_probs.dtype == np.float32
    assert result.target_probs[0] == pytest.approx(expected[best], rel=1e-3)
    assert result.target_probs[1] == result.target_probs[2] == 0.0
    assert np.isnan(result.target_probs[3:]).all()
    position = start + 2
    row = (0, position, [result.token_ids[1]], 0, True)
    told = client.step(row, prob_asks=np.array([(0, position + 1, token) for token in range(512)])).accepted
    assert told.target_probs.sum() == pytest.approx(1.0)
    assert told.target_probs[told.token_ids[0]] > 0.0
    assert np.count_nonzero(told.target_probs) == 5
    for ask, message in (
        ((1, start, 5), "does not emit"),
        ((0, start, 5), "not emit"),
        ((0, start, 512), "vocabulary"),
    ):
        emits = ask[2] == 512
        with pytest.raises(InvalidRequestError, match=message):
            client.step((0, start, anchor, 0, emits), prob_asks=np.array([ask]))
    drafter.close()


@pytest.mark.parametrize("fault", ["session", "vocabulary", "repeated", "slots"])
def test_draft_arenas_that_do_not_fit_are_refused(engine: VerifierEngine, fault: str) -> None:
    client = Client(engine)
    drafter = FakeDrafter(client.session + 1 if fault == "session" else client.session)
    names, sizes = drafter.names, SIZES
    if fault == "vocabulary":
        names = DraftArenas(drafter.names.draft_probs)
    elif fault == "repeated":
        drafter.mapping.rows[0] = drafter.mapping.rows[1]
    elif fault == "slots":
        sizes = SessionSizes(**{**vars(SIZES), "num_slots": 2})
        client = Client(engine, sizes=sizes)
        drafter = FakeDrafter(client.session)
        names = drafter.names
    message = {"session": "is of session", "vocabulary": "16 tokens, the target 512"}.get(fault, "draft_")
    with pytest.raises(StaleArenaError, match=message):
        engine.attach(client.session, sizes, names)
    drafter.close()


def test_attach_is_idempotent_and_a_new_session_drops_the_old_one(
    engine: VerifierEngine, greedy_text: list[int]
) -> None:
    client = Client(engine)
    ring = client.attachment.features_arena
    assert engine.attach(client.session, SIZES, DraftArenas()) == client.attachment
    client.admit(0)
    client.step((0, 0, PROMPT, 0, False))
    with pytest.raises(SessionMismatchError, match="sizes of a session"):
        engine.attach(client.session, SessionSizes(**{**vars(SIZES), "num_slots": 2}), DraftArenas())

    Arena.attach(ring, session=client.session).close()  # a drafter maps the ring, then restarts
    again = engine.attach(client.session, SIZES, DraftArenas())
    assert again.features_arena not in ("", ring)
    assert engine.attach(client.session, SIZES, DraftArenas()) == again
    anchor = client.step((0, len(PROMPT) - 1, PROMPT[-1:], 0, True)).accepted  # slots and K/V were kept
    assert anchor.token_ids == greedy_text[:1]

    successor = Client(engine)
    with pytest.raises(StaleArenaError, match="does not exist"):
        Arena.attach(again.features_arena, session=client.session)
    with pytest.raises(SessionMismatchError, match="attach first"):
        client.step((0, 0, PROMPT, 0, True))
    with pytest.raises(SessionMismatchError, match="slot 0 is not admitted"):
        successor.step((0, 0, PROMPT, 0, True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 2**30}, "lower kv_memory to"),
        ({"max_model_len": 513}, "lower it to 512"),
        ({"feature_layer_ids": (6,)}, r"layers 0 \.\.\. 5"),
        ({"feature_layer_ids": ()}, "feature_layer_ids"),
        ({"num_slots": 0}, "num_slots"),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(engine: VerifierEngine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine.attach(next(SESSIONS), SessionSizes(**{**vars(SIZES), **changes}), DraftArenas())


def test_without_speculation_there_is_no_ring(engine: VerifierEngine, greedy_text: list[int]) -> None:
    sizes = SessionSizes(**{**vars(SIZES), "feature_ring_rows": 0, "feature_layer_ids": (), "max_draft_tokens": 0})
    client = Client(engine, sizes=sizes)
    assert client.attachment.features_arena == ""
    client.admit(1)
    assert client.step((1, 0, PROMPT, 0, True)).accepted.token_ids == greedy_text[:1]


def test_profile_times_every_repeat_beside_a_session(engine: VerifierEngine, greedy_text: list[int]) -> None:
    client = Client(engine)
    client.admit(0)
    client.step((0, 0, PROMPT[:10], 0, False))
    durations = engine.profile(num_tokens=7, context_len=40, repeats=3)
    assert len(durations) == 3
    assert min(durations) > 0
    assert client.step((0, 10, PROMPT[10:], 0, True)).accepted.token_ids == greedy_text[:1]
    with pytest.raises(InvalidRequestError, match="context_len"):
        engine.profile(1, 513, 1)
