"""A row's logits are those of the row alone, bit for bit, in whatever batch, pages and pieces it is computed.

Texts are computed once alone, the compared positions one at a time. Then steps of random rows compute them together:
prefill chunks, decode rows and verify windows whose drafts are wrong from some point on, in pages scattered at random,
with texts thrown out in the middle and computed again in another slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark.v1 import types_pb2
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from launcher.embedded import embedded_dir, is_ready
from service_kit.engine_thread import EngineThread
from service_kit.settings import default_cache_dir
from verifier_service.draft_source import DraftArenas
from verifier_service.engine import VerifierEngine
from verifier_service.loading import load_target
from verifier_service.model import PAGE_SIZE
from verifier_service.session_memory import SessionSizes
from verifier_service.settings import VerifierSettings
from verifier_service.steps import StepBatch, emitted_rows

GOLDEN = Path(__file__).parents[1] / "golden" / "target"
NUM_SLOTS, MAX_STEP_TOKENS, MAX_WINDOW = 6, 320, 8
NUM_COMPARED = 24
"""Positions at the end of each text."""
SESSIONS = itertools.count(1)


@dataclass
class Text:
    """A token sequence, the logits of its last positions alone, and how far a batch has computed it."""

    tokens: list[int]
    alone: dict[int, Tensor] = field(default_factory=dict)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    may_be_preempted: bool = True

    @property
    def first_compared(self) -> int:
        return max(0, len(self.tokens) - NUM_COMPARED)


@dataclass
class Piece:
    """A row of a step: tokens that continue the text, then drafts that do not."""

    text: Text
    num_true: int
    wrong: list[int]
    num_drafts: int
    emits: bool

    def __str__(self) -> str:
        text = self.text
        return f"slot {text.slot} from {text.computed}: {self.num_true} + {len(self.wrong)} wrong, pages {text.pages}"


class Computation:
    """A session of the engine that gives out pages at random and keeps the logits of every emitted position."""

    def __init__(self, engine: VerifierEngine, num_pages: int, max_model_len: int, random: np.random.Generator) -> None:
        self._engine, self._session, self._step_id = engine, next(SESSIONS), 0
        sizes = SessionSizes(
            NUM_SLOTS, num_pages, max_model_len, MAX_STEP_TOKENS, MAX_STEP_TOKENS, MAX_WINDOW - 1, (0,)
        )
        self._epoch = engine.attach(self._session, sizes, DraftArenas()).epoch
        self._random, self._updates = random, types_pb2.SlotUpdates()
        self.free_pages, self.free_slots = list(range(num_pages)), list(range(NUM_SLOTS))

    def admit(self, text: Text) -> bool:
        count = -(-len(text.tokens) // PAGE_SIZE)
        if not self.free_slots or count > len(self.free_pages):
            return False
        self._random.shuffle(self.free_pages)
        self._random.shuffle(self.free_slots)
        text.slot, text.computed = self.free_slots.pop(), 0
        text.pages = [self.free_pages.pop() for _ in range(count)]
        self._updates.admissions.append(types_pb2.SlotAdmission(slot=text.slot, regime=types_pb2.REGIME_GREEDY))
        self._updates.page_slots.extend([text.slot] * count)
        self._updates.page_indices.extend(range(count))
        self._updates.page_ids.extend(text.pages)
        return True

    def release(self, text: Text) -> None:
        self._updates.releases.append(text.slot)
        self.free_slots.append(text.slot)
        self.free_pages += text.pages
        text.slot = -1

    def step(self, pieces: Sequence[Piece]) -> dict[int, dict[int, Tensor]]:
        """Logits by index of the piece and position, of the positions that follow the text alone."""
        tokens = [p.text.tokens[p.text.computed : p.text.computed + p.num_true] + p.wrong for p in pieces]
        self._step_id += 1
        batch = StepBatch(
            session=self._session,
            epoch=self._epoch,
            step_id=self._step_id,
            slots=self._updates,
            row_slots=np.array([piece.text.slot for piece in pieces]),
            row_starts=np.array([piece.text.computed for piece in pieces]),
            row_num_tokens=np.array([len(own) for own in tokens]),
            row_num_drafts=np.array([piece.num_drafts for piece in pieces]),
            row_emits=np.array([piece.emits for piece in pieces]),
            row_rounds=np.ones(len(pieces), np.int64),
            token_ids=np.array([token for own in tokens for token in own]),
        )
        self._updates = types_pb2.SlotUpdates()
        with _recorded_logits(self._engine) as recorded:
            assert self._engine.step(batch).accepted.failures == []
        found: dict[int, dict[int, Tensor]] = {}
        emitted = emitted_rows(batch)
        for row, offset in zip(emitted.rows.tolist(), emitted.offsets.tolist(), strict=True):
            piece = pieces[row]
            anchor = piece.text.computed + len(tokens[row]) - piece.num_drafts - 1
            count = piece.text.computed + piece.num_true - anchor
            found[row] = {anchor + i: recorded[0][offset + i].clone() for i in range(count)}
        for piece in pieces:
            piece.text.computed += piece.num_true
        return found


@contextmanager
def _recorded_logits(engine: VerifierEngine) -> Iterator[list[Tensor]]:
    model, recorded = engine.target.model, list[Tensor]()

    def logits(hidden: Tensor) -> Tensor:
        recorded.append(type(model).logits(model, hidden))
        return recorded[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "logits", logits)
        yield recorded


@contextmanager
def _running(directory: Path, weight_format: str) -> Iterator[VerifierEngine]:
    thread = EngineThread("test-engine")
    settings: Any = {"model": str(directory), "weight_format": weight_format, "kernels": "cpu"}
    engine = VerifierEngine(thread.submit(lambda: load_target(VerifierSettings(**settings))).result(), thread)
    yield engine
    engine.close()
    thread.stop()


def _compute_alone(engine: VerifierEngine, text: Text, random: np.random.Generator) -> None:
    """The compared positions one token at a time, after one chunk with what comes before them."""
    num_pages = -(-len(text.tokens) // PAGE_SIZE)
    computation = Computation(engine, num_pages, num_pages * PAGE_SIZE, random)
    assert computation.admit(text)
    while text.computed < text.first_compared:
        count = min(MAX_STEP_TOKENS, text.first_compared - text.computed)
        computation.step([Piece(text, count, [], 0, emits=False)])
    while text.computed < len(text.tokens):
        text.alone.update(computation.step([Piece(text, 1, [], 0, emits=True)])[0])
    assert len(text.alone) == len(text.tokens) - text.first_compared


def _random_piece(text: Text, budget: int, vocab_size: int, random: np.random.Generator) -> Piece:
    left = len(text.tokens) - text.computed
    if text.computed < text.first_compared or random.random() < 0.2:
        count = int(random.integers(1, min(left, budget) + 1))
        return Piece(text, count, [], 0, emits=bool(random.random() < 0.5))
    num_true = int(random.integers(1, min(MAX_WINDOW, left, budget) + 1))
    room = min(MAX_WINDOW, budget, left) - num_true  # no page for positions behind the text
    wrong = random.integers(0, vocab_size, int(random.integers(0, room + 1))).tolist()
    return Piece(text, num_true, wrong, num_true + len(wrong) - 1, emits=True)


def _assert_exact_in_batches(engine: VerifierEngine, texts: Sequence[Text], random: np.random.Generator) -> int:
    """Computes all texts together in random steps; returns the number of compared positions."""
    lengths = [-(-len(text.tokens) // PAGE_SIZE) for text in texts]
    computation = Computation(engine, sum(lengths) + 3, max(lengths) * PAGE_SIZE, random)
    vocab_size, num_compared = engine.target.model.config.vocab_size, 0
    for text in texts:
        text.slot, text.may_be_preempted = -1, True
    unfinished = list(texts)
    while unfinished:
        for text in unfinished:
            if text.slot < 0:
                computation.admit(text)
        running = [text for text in unfinished if text.slot >= 0]
        chosen = [running[i] for i in random.permutation(len(running))[: random.integers(1, len(running) + 1)]]
        pieces, budget = list[Piece](), MAX_STEP_TOKENS
        for text in chosen:
            if budget:
                pieces.append(_random_piece(text, budget, vocab_size, random))
                budget -= pieces[-1].num_true + len(pieces[-1].wrong)
        step = "; ".join(map(str, pieces))
        for index, logits in computation.step(pieces).items():
            for position, found in logits.items():
                if position in (alone := pieces[index].text.alone):
                    num_compared += 1
                    same = torch.equal(found.view(torch.int32), alone[position].view(torch.int32))
                    assert same, f"row {index}, position {position}, in the step {step}"
        for text in chosen:
            if text.may_be_preempted and random.random() < 0.1 and text.computed < len(text.tokens):
                text.may_be_preempted = False
                computation.release(text)
            elif text.computed == len(text.tokens):
                computation.release(text)
                unfinished.remove(text)
    return num_compared


def _check(engine: VerifierEngine, lengths: Sequence[int], seeds: Sequence[int]) -> None:
    random = np.random.default_rng(0)
    vocab_size = engine.target.model.config.vocab_size
    texts = [Text(random.integers(0, vocab_size, length).tolist()) for length in lengths]
    for text in texts:
        _compute_alone(engine, text, random)
    for seed in seeds:
        num_compared = _assert_exact_in_batches(engine, texts, np.random.default_rng(seed))
        assert num_compared > NUM_COMPARED, f"seed {seed}: only {num_compared} positions were compared"


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, odd sizes, sliding windows that end inside pages."""
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=37,
        max_window_layers=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("windowed")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("weight_format", ["float32", "fp16"])
@pytest.mark.parametrize("family", ["golden", "windowed"])
def test_rows_of_tiny_targets_are_exact(family: str, weight_format: str, windowed: Path) -> None:
    with _running(GOLDEN if family == "golden" else windowed, weight_format) as engine:
        _check(engine, (300, 47, 64, 90, 33, 150, 17), range(6))


@pytest.mark.model
@pytest.mark.parametrize("weight_format", ["q4", "fp16"])
def test_rows_of_the_embedded_target_are_exact(weight_format: str) -> None:
    directory = embedded_dir(default_cache_dir())
    if not is_ready(directory):
        pytest.skip("needs the embedded target: run `make setup`")
    with _running(directory, weight_format) as engine:
        _check(engine, (560, 47, 130, 33), range(2))
