"""Controls and scores on the golden target: what plain decoding by the rules gives, whatever is drafted or chained."""

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

from kernels.draws import coupled_index
from kernels.logit_controls.reference import controlled_logits
from kernels.sampling import LogitControls, Regime, SlotSampling
from kernels.target_probs import reference as target_reference
from kernels.token_scores.reference import token_score
from service_kit.engine_thread import EngineThread
from service_kit.errors import SessionMismatchError
from verifier_service.draft_source import DraftArenas
from verifier_service.engine import VerifierEngine
from verifier_service.loading import load_target
from verifier_service.session_memory import SessionSizes
from verifier_service.settings import VerifierSettings
from verifier_service.steps import Acceptance, StepBatch

GOLDEN = Path(__file__).parents[1] / "golden" / "target"
SIZES = SessionSizes(3, 12, 64, 64, 24, 4, (0, 2))
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 512, 12)]
NUM_NEW = 24
KEY = 9

CONTROLS = {
    "penalties": LogitControls(1.3, 0.4, 0.6),
    "rewards": LogitControls(0.9, -0.5, -1.0),
    "bias": LogitControls(bias=((7, 4.0), (221, -100.0))),
    "bans": LogitControls(frequency_penalty=-1.0, banned_sequences=((221,), (480, 480), (480, 259, 480))),
    "end": LogitControls(bias=((5, 100.0),), min_tokens=10, stop_token_ids=(5,)),
}


def wire(controls: LogitControls, text: list[int], **scores: int) -> types_pb2.TargetOptions:
    return types_pb2.TargetOptions(
        repetition_penalty=controls.repetition_penalty,
        frequency_penalty=controls.frequency_penalty,
        presence_penalty=controls.presence_penalty,
        bias_token_ids=[token_id for token_id, _ in controls.bias],
        bias_values=[value for _, value in controls.bias],
        banned_sequences=[types_pb2.TokenSequence(token_ids=each) for each in controls.banned_sequences],
        min_tokens=controls.min_tokens,
        stop_token_ids=controls.stop_token_ids,
        text_token_ids=text,
        num_prompt_tokens=len(PROMPT),
        **scores,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[VerifierEngine]:
    thread = EngineThread("test-engine")
    settings = VerifierSettings(model=str(GOLDEN), weight_format="float32", kernels="reference", threads=1)
    target = thread.submit(lambda: load_target(settings)).result()
    engine = VerifierEngine(target, thread)
    yield engine
    engine.close()
    thread.stop()


class Oracle:
    """Plain decoding by `transformers` and the reference rules."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(GOLDEN, local_files_only=True).eval()

    def logits(self, text: list[int]) -> Any:
        """Of every position."""
        with torch.no_grad():
            return self.model(torch.tensor([text])).logits[0].numpy()

    def text(self, sampling: SlotSampling, controls: LogitControls) -> list[int]:
        tokens = list(PROMPT)
        for _ in range(NUM_NEW):
            logits = controlled_logits(self.logits(tokens)[-1], controls, tokens, len(PROMPT))
            probs = target_reference.target_probs(logits[None], sampling)[0]
            greedy = sampling.regime is Regime.GREEDY
            tokens.append(int(probs.argmax()) if greedy else coupled_index(probs, None, sampling.key, len(tokens)))
        return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


class Client:
    """One slot with all its pages."""

    sessions = iter(range(500, 10_000))

    def __init__(self, engine: VerifierEngine, sampling: SlotSampling, target: types_pb2.TargetOptions) -> None:
        self.engine, self.session, self.step_id = engine, next(self.sessions), 0
        self.epoch = engine.attach(self.session, SIZES, DraftArenas()).epoch
        self.updates = types_pb2.SlotUpdates()
        self.admit(sampling, target)

    def admit(self, sampling: SlotSampling, target: types_pb2.TargetOptions) -> None:
        self.updates.releases.append(0)
        self.updates.admissions.append(
            types_pb2.SlotAdmission(
                slot=0,
                regime=types_pb2.Regime.ValueType(sampling.regime),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                key=sampling.key,
                target=target,
            )
        )
        for index in range(4):
            self.updates.page_slots.append(0)
            self.updates.page_indices.append(index)
            self.updates.page_ids.append(index)

    def step(
        self, start: int, tokens: list[int], num_drafts: int = 0, emits: bool = True, chained: bool = False
    ) -> Acceptance:
        self.step_id += 1
        batch = StepBatch(
            self.session,
            self.epoch,
            self.step_id,
            self.updates,
            np.array([0]),
            np.array([start]),
            np.array([len(tokens)]),
            np.array([num_drafts]),
            np.array([emits]),
            np.array([1]),
            np.array(tokens),
            np.array([True] if chained else [], np.bool_),
        )
        self.updates = types_pb2.SlotUpdates()
        accepted = self.engine.step(batch).accepted
        assert accepted.failures == []
        return accepted


REGIMES = {"greedy": SlotSampling(Regime.GREEDY), "seeded": SlotSampling(Regime.COUPLED, 0.9, top_p=0.95, key=KEY)}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", CONTROLS)
def test_the_text_is_plain_decodings_whatever_is_drafted(
    engine: VerifierEngine, oracle: Oracle, name: str, regime: str
) -> None:
    sampling, controls = REGIMES[regime], CONTROLS[name]
    expected = oracle.text(sampling, controls)
    assert expected != oracle.text(sampling, LogitControls())
    client = Client(engine, sampling, wire(controls, PROMPT))
    client.step(0, PROMPT[:5], emits=False)
    text = list(client.step(5, PROMPT[5:]).token_ids)
    outcomes: set[int] = set()
    for turn in itertools.count():
        if len(text) >= NUM_NEW:
            break
        num_right = (3, 0, 2, 1, 3)[turn % 5]
        drafts = [*expected[len(text) : len(text) + num_right], (expected[-1] + 1) % 512][:4]
        accepted = client.step(len(PROMPT) + len(text) - 1, [text[-1], *drafts], len(drafts))
        outcomes.add(accepted.accepted_lens[0])
        kept = accepted.token_ids[: max(1, len(accepted.token_ids) - turn % 2)]  # a commit may be cut short
        text += kept
        if turn % 3 == 2 and len(text) < NUM_NEW:  # preempted: everything again from the text
            client.admit(sampling, wire(controls, PROMPT + text))
            client.step(0, (PROMPT + text)[:20], emits=False)
            if len(PROMPT + text) > 21:
                client.step(20, (PROMPT + text)[20:-1], emits=False)
    assert len(outcomes) > 2
    assert text[:NUM_NEW] == expected


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", CONTROLS)
def test_the_text_is_the_same_in_chained_steps(engine: VerifierEngine, oracle: Oracle, name: str, regime: str) -> None:
    sampling, controls = REGIMES[regime], CONTROLS[name]
    client = Client(engine, sampling, wire(controls, PROMPT))
    text = list(client.step(0, PROMPT).token_ids)
    while len(text) < NUM_NEW:
        text += client.step(len(PROMPT) + len(text) - 1, [0], chained=True).token_ids
    assert text == oracle.text(sampling, controls)


def test_scores_are_of_the_targets_own_distribution(engine: VerifierEngine, oracle: Oracle) -> None:
    """Of the prompt, and of every committed token: accepted drafts and the one after them."""
    controls, sampling = CONTROLS["penalties"], REGIMES["greedy"]
    expected = oracle.text(sampling, controls)
    client = Client(engine, sampling, wire(controls, PROMPT, num_logprobs=2, num_prompt_logprobs=3))
    chunk = client.step(0, PROMPT[:5], emits=False)
    last = client.step(5, PROMPT[5:])
    start = len(PROMPT)
    verify = client.step(start, [*expected[:3], (expected[3] + 1) % 512], 3)
    assert verify.accepted_lens == [2]
    assert (chunk.scores, verify.prompt_scores) == ({}, {})
    assert len(chunk.prompt_scores[0]) == 5
    found = [*chunk.prompt_scores[0], *last.prompt_scores[0], *last.scores[0], *verify.scores[0]]
    text = [*PROMPT, *expected[:4]]
    logits = oracle.logits(text)
    assert len(found) == len(text) - 1
    for position, score in enumerate(found, 1):
        wanted = token_score(logits[position - 1], text[position], 3 if position < start else 2)
        assert (score.rank, score.top_ids) == (wanted.rank, wanted.top_ids)
        np.testing.assert_allclose(
            [score.logprob, *score.top_logprobs], [wanted.logprob, *wanted.top_logprobs], atol=1e-4
        )


def test_prompt_scores_of_a_long_chunk_come_in_parts(engine: VerifierEngine, oracle: Oracle, monkeypatch: Any) -> None:
    monkeypatch.setattr("verifier_service.prompt_scores._MAX_ROWS", 4)
    client = Client(engine, REGIMES["greedy"], wire(LogitControls(), PROMPT, num_prompt_logprobs=0))
    scores = client.step(0, PROMPT).prompt_scores[0]
    logits = oracle.logits(PROMPT)
    wanted = [token_score(logits[i], token_id, 0).logprob for i, token_id in enumerate(PROMPT[1:])]
    np.testing.assert_allclose([score.logprob for score in scores], wanted, atol=1e-4)


def test_a_row_of_which_the_text_is_not_known_fails(engine: VerifierEngine) -> None:
    client = Client(engine, REGIMES["greedy"], wire(CONTROLS["penalties"], PROMPT[:5]))
    with pytest.raises(AssertionError, match="known up to position 5, the anchor is at 11"):
        client.step(0, PROMPT)


def test_ids_outside_the_vocabulary_are_refused(engine: VerifierEngine) -> None:
    client = Client(engine, REGIMES["greedy"], wire(LogitControls(bias=((512, 1.0),)), PROMPT))
    with pytest.raises(SessionMismatchError, match="outside the vocabulary"):
        client.step(0, PROMPT)
