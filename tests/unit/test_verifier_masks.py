"""Token masks on the golden target: every verified position and the bonus under its own, and none that is stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from dspark.v1 import types_pb2
from unit.test_verifier_controls import KEY, PROMPT, REGIMES, SIZES, Oracle, engine, oracle, wire

from kernels.draws import coupled_index
from kernels.logit_controls.reference import controlled_logits
from kernels.sampling import LogitControls, Regime, SlotSampling
from kernels.target_probs import reference as target_reference
from kernels.token_masks.reference import mask_logits
from kernels.token_scores.reference import token_score
from service_kit.errors import InvalidRequestError, StaleArenaError
from service_kit.handoff import Arena, ArenaSpec
from verifier_service.draft_source import DraftArenas
from verifier_service.engine import VerifierEngine
from verifier_service.steps import Acceptance, StepBatch

__all__ = ["engine", "oracle"]  # fixtures

VOCAB_SIZE, NUM_WORDS, NUM_NEW = 512, 16, 16
SHAPE = (SIZES.num_slots, SIZES.max_draft_tokens + 1, NUM_WORDS)
SESSIONS = iter(range(20_000, 30_000))
CONTROLS = LogitControls(1.3, 0.4, bias=((7, 2.0),), banned_sequences=((30,),))


def mask_of(text: list[int]) -> npt.NDArray[np.uint32]:
    """Some 50 tokens, others after every text."""
    allowed = np.random.default_rng(text).random(VOCAB_SIZE) < 0.1
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def plain_text(oracle: Oracle, sampling: SlotSampling, controls: LogitControls) -> list[int]:
    """Plain masked decoding by the references."""
    tokens = list(PROMPT)
    for _ in range(NUM_NEW):
        logits = controlled_logits(oracle.logits(tokens)[-1], controls, tokens, len(PROMPT))
        mask_logits(logits[None], mask_of(tokens)[None])
        probs = target_reference.target_probs(logits[None], sampling)[0]
        greedy = sampling.regime is Regime.GREEDY
        tokens.append(int(probs.argmax()) if greedy else coupled_index(probs, None, KEY, len(tokens)))
    return tokens[len(PROMPT) :]


class Client:
    """One slot with all its pages, and the masks arena."""

    def __init__(self, engine: VerifierEngine, sampling: SlotSampling, controls: LogitControls, **scores: int) -> None:
        self.engine, self.session, self.step_id = engine, next(SESSIONS), 0
        self.arena = Arena.create(ArenaSpec(SHAPE, np.uint32, 1, self.session, self.session))
        self.epoch = engine.attach(self.session, SIZES, DraftArenas(), self.arena.name).epoch
        assert engine.attach(self.session, SIZES, DraftArenas(), self.arena.name).epoch == self.epoch  # no new one
        admission = types_pb2.SlotAdmission(
            slot=0,
            regime=types_pb2.Regime.ValueType(sampling.regime),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            key=sampling.key,
            target=wire(controls, PROMPT, **scores),
        )
        self.updates = types_pb2.SlotUpdates(
            admissions=[admission], page_slots=[0] * 4, page_indices=range(4), page_ids=range(4)
        )

    def fill(self, text: list[int], drafts: list[int], **stamp: int) -> None:
        """Masks of the tokens after `text` and its drafts, for the next step unless `stamp` says otherwise."""
        for k in range(len(drafts) + 1):
            self.arena.rows[0, k] = mask_of([*text, *drafts[:k]])
        named = {"session": self.session, "step_id": self.step_id + 1, "slot": 0, "position": len(text), **stamp}
        self.arena.stamps[0] = list(named.values())

    def step(self, start: int, tokens: list[int], num_drafts: int = 0, **rows: Any) -> Acceptance:
        self.step_id += 1
        values = {"row_emits": np.array([True]), "row_masked": np.array([True]), **rows}
        batch = StepBatch(
            self.session,
            self.epoch,
            self.step_id,
            self.updates,
            row_slots=np.array([0]),
            row_starts=np.array([start]),
            row_num_tokens=np.array([len(tokens)]),
            row_num_drafts=np.array([num_drafts]),
            row_rounds=np.array([1]),
            token_ids=np.array(tokens),
            **values,
        )
        self.updates = types_pb2.SlotUpdates()
        return self.engine.step(batch).accepted

    def close(self) -> None:
        self.arena.close()


@pytest.fixture
def client(engine: VerifierEngine) -> Iterator[Client]:
    client = Client(engine, REGIMES["greedy"], LogitControls(), num_logprobs=2)
    yield client
    client.close()


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("controls", [LogitControls(), CONTROLS], ids=["masks", "masks and controls"])
def test_the_text_is_plain_masked_decodings(
    engine: VerifierEngine, oracle: Oracle, controls: LogitControls, regime: str
) -> None:
    expected = plain_text(oracle, REGIMES[regime], controls)
    client = Client(engine, REGIMES[regime], controls)
    client.fill(PROMPT, [])
    text = list(client.step(0, PROMPT).token_ids)
    outcomes = set()
    while len(text) < NUM_NEW:
        num_right = (3, 0, 2, 4)[len(outcomes) % 4]
        drafts = [*expected[len(text) : len(text) + num_right], (expected[-1] + 1) % 512][:4]
        client.fill(PROMPT + text, drafts)
        accepted = client.step(len(PROMPT) + len(text) - 1, [text[-1], *drafts], len(drafts))
        assert accepted.failures == []
        outcomes.add(accepted.accepted_lens[0])
        text += accepted.token_ids
    assert len(outcomes) > 2
    assert text[:NUM_NEW] == expected
    client.close()


def test_scores_are_of_the_targets_own_distribution(client: Client, oracle: Oracle) -> None:
    client.fill(PROMPT, [])
    accepted = client.step(0, PROMPT)
    (score,), wanted = accepted.scores[0], token_score(oracle.logits(PROMPT)[-1], accepted.token_ids[0], 2)
    assert (score.rank, score.top_ids) == (wanted.rank, wanted.top_ids)
    assert score.rank > 1, "masked, the best token is another"


def test_controls_give_way_where_they_leave_nothing(engine: VerifierEngine) -> None:
    for min_tokens, allowed, expected in ((9, (5,), 5), (9, (5, 6), 6), (0, (5,), 5)):
        controls = LogitControls(bias=((5, 100.0),), min_tokens=min_tokens, stop_token_ids=(5,))
        client = Client(engine, REGIMES["greedy"], controls)
        client.fill(PROMPT, [])
        client.arena.rows[0, 0] = 0
        for token_id in allowed:
            client.arena.rows[0, 0, token_id // 32] |= np.uint32(1 << token_id % 32)
        assert client.step(0, PROMPT).token_ids == [expected]
        client.close()


@pytest.mark.parametrize("stamp", [{"session": 1}, {"step_id": 7}, {"slot": 1}, {"position": 3}])
def test_masks_of_another_step_fail_their_row_alone(client: Client, stamp: dict[str, int]) -> None:
    client.fill(PROMPT, [], **stamp)
    (failure,) = client.step(0, PROMPT).failures
    assert "masks of slot 0 carry" in failure.reason
    client.fill(PROMPT, [])
    assert client.step(0, PROMPT).failures == []


def test_masks_that_allow_nothing_fail_the_row(client: Client) -> None:
    client.fill(PROMPT, [])
    client.arena.rows[0, 0] = 0
    assert "no finite value" in client.step(0, PROMPT).failures[0].reason


def test_rows_that_cannot_be_masked_are_refused(client: Client) -> None:
    for rows in ({"row_masked": np.array([True, True])}, {"row_emits": np.array([False])}):
        with pytest.raises(InvalidRequestError) as caught:
            client.step(0, PROMPT, **rows)
        assert caught.value.field == "row_masked"


def test_arenas_that_do_not_fit_are_refused(engine: VerifierEngine) -> None:
    for shape, dtype, stamp_dims in (((3, 5, 15), np.uint32, 1), (SHAPE, np.float32, 1), (SHAPE, np.uint32, 0)):
        session = next(SESSIONS)
        arena = Arena.create(ArenaSpec(shape, dtype, stamp_dims, session, session))
        with pytest.raises(StaleArenaError, match="masks are"):
            engine.attach(session, SIZES, DraftArenas(), arena.name)
        arena.close()
    client = Client(engine, REGIMES["greedy"], LogitControls())
    client.fill(PROMPT, [])
    engine.attach(client.session, SIZES, DraftArenas())  # a scheduler without masks
    assert "no masks arena" in client.step(0, PROMPT).failures[0].reason
    client.close()
