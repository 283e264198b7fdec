"""A verifier and a drafter without a model, for the scheduler's tests.

The toy target's next token is a hash of the whole prefix, and the prefix is read back through the page table, so any
mix-up of pages, slots or positions changes the text. K/V of a position is its token; its feature likewise. The drafter
keeps its own pages, refuses stale feature rows, asserts that the context of an anchor is complete, and drafts the
target's own next token with a given probability. Both are servicers (wire types in and out).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dspark.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, verifier_pb2, verifier_pb2_grpc

from kernels.sampling import Regime, SlotSampling
from service_kit.errors import SessionMismatchError
from service_kit.rpc import CONTRACT_VERSION
from service_kit.slots import SlotTable

VOCAB_SIZE = 50
EOS_ID = 0
PAGE_SIZE = 4
NUM_LAYERS = 6
HIDDEN_SIZE = 8


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def next_token(prefix: list[int], sampling: SlotSampling, round_: int = 0) -> int:
    """The toy target: any dependence on the key, and for rejection rows on the round, that the regime allows."""
    key: tuple[int, ...] = ()
    if sampling.regime is Regime.COUPLED:
        key = (sampling.key,)
    elif sampling.regime is Regime.REJECTION:
        key = (sampling.key, round_)
    return 1 + _hash(prefix, key) % (VOCAB_SIZE - 1)


def reference_text(prompt: list[int], count: int, sampling: SlotSampling) -> list[int]:
    """`count` tokens of plain decoding without any scheduler."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, sampling))
    return tokens[len(prompt) :]


@dataclass
class Ring:
    """The shared feature ring: (step id, position, token) per (slot, position % rows)."""

    rows: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    size: int = 0


class StepGate:
    """Lets a given number of steps through, then holds the next until it is opened."""

    def __init__(self, num_steps: int = 0) -> None:
        self._permits = threading.Semaphore(num_steps)
        self._is_open = False

    def wait(self) -> None:
        """Called by the step thread alone."""
        if not self._is_open:
            assert self._permits.acquire(timeout=20), "the gate was not opened"

    def open_for(self, num_steps: int) -> None:
        """Lets so many more steps through."""
        for _ in range(num_steps):
            self._permits.release()

    def open(self) -> None:
        """Holds nothing any more."""
        self._is_open = True
        self._permits.release()


@dataclass
class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """A VerifierService over the toy target."""

    ring: Ring
    max_position: int = 64
    page_bytes: int = 1000
    vocab_size: int = VOCAB_SIZE
    contract_version: int = CONTRACT_VERSION
    fail_rows: dict[int, str] = field(default_factory=dict)
    """Slots whose rows fail in every call until removed."""
    fail_drafted: bool = False
    """Whether rows with drafts fail."""
    raises: Exception | None = None
    attaches: list[Any] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    gate: StepGate | None = None
    """When given, every Step passes it."""
    after_step: Callable[[Any], None] | None = None
    """Given each Step's request once it has run."""

    def GetInfo(self, request: Any, context: Any) -> Any:
        return verifier_pb2.VerifierServiceGetInfoResponse(
            contract_version=self.contract_version,
            model="toy-target",
            vocab_size=self.vocab_size,
            hidden_size=HIDDEN_SIZE,
            num_layers=NUM_LAYERS,
            max_position=self.max_position,
            page_bytes=self.page_bytes,
            page_size=PAGE_SIZE,
            eos_token_ids=[EOS_ID],
            padded_rows=[1, 2, 4, 4],
            sampling_defaults=verifier_pb2.SamplingDefaults(temperature=0.5),
            inexact_reason="a toy",
        )

    def Attach(self, request: Any, context: Any) -> Any:
        self.attaches.append(request)
        if not request.draft_probs_arena:
            self.slots = SlotTable(request.num_slots, request.num_pages, request.max_model_len, PAGE_SIZE)
            self.kv: dict[tuple[int, int], int] = {}
            self.last_step_id = 0
            self.emissions: dict[int, tuple[int, int]] = {}
            self.ring.rows.clear()
            self.ring.size = request.feature_ring_rows
            self.limits = request
        return verifier_pb2.VerifierServiceAttachResponse(epoch=7, features_arena="features")

    def step_bytes(self, message: bytes) -> bytes:
        answer: bytes = self.Step(verifier_pb2.StepRequest.FromString(message), None).SerializeToString()
        return answer

    def Step(self, request: Any, context: Any) -> Any:
        if self.gate is not None:
            self.gate.wait()
        if self.raises is not None:
            raise self.raises
        assert request.session == self.limits.session
        assert request.epoch == 7
        assert request.step_id > self.last_step_id
        assert len(request.token_ids) <= self.limits.max_batch_tokens
        assert len(set(request.row_slots)) == len(request.row_slots) > 0
        self.last_step_id = request.step_id
        self.calls.append(request)
        self.slots.apply(request.slots)
        reply = verifier_pb2.StepResponse(timings=[types_pb2.PhaseTiming(phase="forward", duration_ns=1000)])
        offset = 0
        emissions, self.emissions = self.emissions, {}
        for index, slot in enumerate(request.row_slots):
            start, count = request.row_starts[index], request.row_num_tokens[index]
            tokens = list(request.token_ids[offset : offset + count])
            offset += count
            if request.row_chained and request.row_chained[index]:
                assert (count, request.row_num_drafts[index], request.row_emits[index]) == (1, 0, True)
                position, token = emissions.get(slot, (-1, 0))
                if position != start:
                    reply.failures.append(types_pb2.RowFailure(row=index, reason="nothing was emitted"))
                    reply.verify_lens.append(0)
                    reply.accepted_lens.append(0)
                    continue
                tokens = [token]
            self.slots.require_span(slot, 0, start + count)
            num_drafts, emits = request.row_num_drafts[index], request.row_emits[index]
            if slot in self.fail_rows or (self.fail_drafted and num_drafts):
                reply.failures.append(types_pb2.RowFailure(row=index, reason=self.fail_rows.get(slot, "stale drafts")))
                reply.verify_lens.append(0)
                reply.accepted_lens.append(0)
                continue
            round_ = request.row_rounds[index] if emits else None
            accepted, emitted = self._row(slot, start, tokens, num_drafts, round_, request.step_id)
            reply.verify_lens.append(num_drafts)
            reply.accepted_lens.append(accepted if emits else 0)
            if emits:
                reply.token_ids.extend(emitted)
                self.emissions[slot] = (start + count - num_drafts + accepted, emitted[-1])
            else:
                assert not num_drafts
        reply.target_probs = self._target_probs(request, reply)
        if self.after_step is not None:
            self.after_step(request)
        return reply

    def _target_probs(self, request: Any, reply: Any) -> bytes:
        """The toy target is certain: 1 for the token it would emit at a position, where it emitted one."""
        failed = {failure.row for failure in reply.failures}
        probs = []
        for row, position, token in zip(request.prob_rows, request.prob_positions, request.prob_token_ids, strict=True):
            slot, anchor = request.row_slots[row], request.row_starts[row] + request.row_num_tokens[row] - 1
            anchor -= request.row_num_drafts[row]
            sampling, table = self.slots.sampling[slot], self.slots.page_table[slot]
            assert request.row_emits[row]
            assert sampling is not None
            assert sampling.regime is Regime.REJECTION
            if row in failed or not anchor < position <= anchor + 1 + reply.accepted_lens[row]:
                probs.append(float("nan"))
                continue
            prefix = [self.kv[(int(table[p // PAGE_SIZE]), p % PAGE_SIZE)] for p in range(position)]
            probs.append(float(token == next_token(prefix, sampling, request.row_rounds[row])))
        return np.array(probs, "<f4").tobytes()

    def _row(
        self, slot: int, start: int, tokens: list[int], num_drafts: int, round_: int | None, step_id: int
    ) -> tuple[int, list[int]]:
        """Computes the row; it emits if there is a round."""
        sampling = self.slots.sampling[slot]
        assert sampling is not None
        table = self.slots.page_table[slot]
        for position, token in enumerate(tokens, start):
            assert position < self.limits.max_model_len
            self.kv[(int(table[position // PAGE_SIZE]), position % PAGE_SIZE)] = token
            if self.ring.size:
                self.ring.rows[(slot, position % self.ring.size)] = (step_id, position, token)
        assert not self.ring.size or len(tokens) <= self.ring.size
        if round_ is None:
            return 0, []
        end = start + len(tokens)
        prefix = [self.kv[(int(table[p // PAGE_SIZE]), p % PAGE_SIZE)] for p in range(end)]
        first = end - num_drafts
        accepted = 0
        while accepted < num_drafts:
            if prefix[first + accepted] != next_token(prefix[: first + accepted], sampling, round_):
                break
            accepted += 1
        bonus = next_token(prefix[: first + accepted], sampling, round_)
        return accepted, [*prefix[first : first + accepted], bonus]


@dataclass
class FakeDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """A DrafterService that drafts the toy target's token with probability `quality`, else a wrong one."""

    ring: Ring
    quality: float = 0.7
    block_size: int = 5
    elastic_block_sizes: tuple[int, ...] = ()
    page_bytes: int = 500
    target_vocab_size: int = VOCAB_SIZE
    target_hidden_size: int = HIDDEN_SIZE
    num_target_layers: int = NUM_LAYERS
    page_size: int = PAGE_SIZE
    target_layer_ids: tuple[int, ...] = (1, 3)
    contract_version: int = CONTRACT_VERSION
    fail_ingest_slots: set[int] = field(default_factory=set)
    raises: Exception | None = None
    attaches: list[Any] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    confidence: float | None = None
    """Reported instead of the truth when given."""

    def GetInfo(self, request: Any, context: Any) -> Any:
        return drafter_pb2.DrafterServiceGetInfoResponse(
            contract_version=self.contract_version,
            model="toy-drafter",
            block_size=self.block_size,
            elastic_block_sizes=self.elastic_block_sizes,
            target_vocab_size=self.target_vocab_size,
            draft_vocab_size=self.target_vocab_size,
            target_hidden_size=self.target_hidden_size,
            target_layer_ids=self.target_layer_ids,
            num_target_layers=self.num_target_layers,
            page_bytes=self.page_bytes,
            page_size=self.page_size,
            calibration="by a toy",
        )

    def Attach(self, request: Any, context: Any) -> Any:
        assert request.features_arena == "features"
        self.attaches.append(request)
        self.slots = SlotTable(request.num_slots, request.num_pages, request.max_model_len, PAGE_SIZE)
        self.kv: dict[tuple[int, int], int] = {}
        self.rounds: dict[tuple[int, int], int] = {}
        self.last_step_id = 0
        self.session = request.session
        return drafter_pb2.DrafterServiceAttachResponse(epoch=9, draft_probs_arena="draft-probs")

    def draft_bytes(self, message: bytes) -> bytes:
        answer: bytes = self.Draft(drafter_pb2.DraftRequest.FromString(message), None).SerializeToString()
        return answer

    def Draft(self, request: Any, context: Any) -> Any:
        if self.raises is not None:
            raise self.raises
        assert (request.session, request.epoch) == (self.session, 9)
        assert request.step_id > self.last_step_id
        assert request.row_slots or request.ingest_slots, "an empty Draft call"
        assert 1 <= request.num_draft_tokens <= self.block_size
        self.last_step_id = request.step_id
        self.calls.append(request)
        self.slots.apply(request.slots)
        reply = drafter_pb2.DraftResponse(timings=[types_pb2.PhaseTiming(phase="backbone", duration_ns=500)])
        for index in range(len(request.ingest_slots)):
            if reason := self._ingest(request, index):
                reply.ingest_failures.append(types_pb2.RowFailure(row=index, reason=reason))
        confidences: list[float] = []
        regimes = [sampling and sampling.regime for sampling in (self.slots.sampling[s] for s in request.row_slots)]
        if Regime.REJECTION in regimes:
            certain = [[1.0 if regime is Regime.REJECTION else np.nan] * request.num_draft_tokens for regime in regimes]
            reply.draft_probs = np.array(certain, "<f4").tobytes()
        for index, slot in enumerate(request.row_slots):
            if slot in self.fail_ingest_slots:
                reply.token_ids.extend([0] * request.num_draft_tokens)
                confidences += [float("nan")] * request.num_draft_tokens
                continue
            anchor, position = request.row_anchor_ids[index], request.row_anchor_positions[index]
            block = self._block(slot, anchor, position, request.row_rounds[index])
            for draft, confidence in block[: request.num_draft_tokens]:
                reply.token_ids.append(draft)
                confidences.append(confidence)
        reply.confidences = np.array(confidences, "<f4").tobytes()
        return reply

    def _ingest(self, request: Any, index: int) -> str:
        slot, start, count = request.ingest_slots[index], request.ingest_starts[index], request.ingest_counts[index]
        self.slots.require_span(slot, start, count)
        if slot in self.fail_ingest_slots:
            return "the row is gone"
        for position in range(start, start + count):
            step_id, at, token = self.ring.rows[(slot, position % self.ring.size)]
            oldest, newest = request.ingest_oldest_step_ids[index], request.ingest_newest_step_ids[index]
            assert at == position, f"ring row of position {position} holds {at}"
            assert oldest <= step_id <= newest, f"row of step {step_id} is outside {oldest} ... {newest}"
            page = int(self.slots.page_table[slot][position // PAGE_SIZE])
            self.kv[(page, position % PAGE_SIZE)] = token
        return ""

    def _block(self, slot: int, anchor: int, position: int, round_: int) -> list[tuple[int, float]]:
        sampling = self.slots.sampling[slot]
        if sampling is None:
            raise SessionMismatchError(f"slot {slot} is not admitted")
        assert round_ > self.rounds.get((slot, sampling.key), 0) or sampling.key == 0, "a round was used twice"
        self.rounds[(slot, sampling.key)] = round_
        table = self.slots.page_table[slot]
        prefix = [self.kv[(int(table[p // PAGE_SIZE]), p % PAGE_SIZE)] for p in range(position)] + [anchor]
        block = []
        for _ in range(self.block_size):
            token = next_token(prefix, sampling, round_)
            is_right = _hash("draft", prefix, round_) % 1000 < self.quality * 1000
            draft = token if is_right else 1 + token % (VOCAB_SIZE - 1)
            truth = 0.9 if is_right else 0.2
            block.append((draft, truth if self.confidence is None else self.confidence))
            prefix.append(draft)
        return block


def fake_pair(**drafter: Any) -> tuple[FakeVerifier, FakeDrafter]:
    """A verifier and a drafter that share a feature ring."""
    ring = Ring()
    return FakeVerifier(ring), FakeDrafter(ring, **drafter)
