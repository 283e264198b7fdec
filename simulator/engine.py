"""An engine whose steps cost what a table says and whose drafts survive as a population says.

Everything that decides is the scheduler's own code: draft gates, verify policies, online costs. The simulated part is
what the models and the machine would do. Left out: prefill, pages, and what a row that was not drafted for a while has
to ingest first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.draft_gate import Candidates, DraftDecision, DraftGate, StepShape
from scheduler_service.draft_history import DraftedRounds
from scheduler_service.policy import DraftedBatch, StepWork, VerifyPolicy
from simulator.population import Floats, Ints, Population

_NO_CONTEXTS = np.empty(0)


class Scheduling(NamedTuple):
    """Who decides; None: plain decoding."""

    gate: DraftGate
    policy: VerifyPolicy
    costs: OnlineCosts | None = None
    """Learns from every step, if the policy asks for it."""


@dataclass
class Totals:
    """Sums over the steps that count."""

    num_steps: int = 0
    num_rounds: int = 0
    """Rows of all steps."""
    num_tokens: int = 0
    num_drafted_rows: int = 0
    num_slots: int = 0
    """Slots drafted."""
    num_verified: int = 0
    num_accepted: int = 0
    ns: float = 0.0
    class_tokens: Ints = field(default_factory=lambda: np.zeros(0, np.intp))
    class_rounds: Ints = field(default_factory=lambda: np.zeros(0, np.intp))
    class_verified: Ints = field(default_factory=lambda: np.zeros(0, np.intp))
    """[classes] each."""


class SimulatedEngine:
    """Rows that decode for ever: where an answer ends, the next request begins."""

    def __init__(
        self, costs: CostModel, population: Population, num_rows: int, seed: int, scheduling: Scheduling | None
    ) -> None:
        """`costs`: what steps really take, whatever the scheduling believes."""
        self._costs, self._block_size, self._scheduling = costs, population.block_size, scheduling
        self._stream = population.stream(num_rows, seed)
        self._num_classes = len(population.class_names)
        self._contexts, self._left, self._class_ids = (np.zeros(num_rows, np.intp) for _ in range(3))
        self._keys = list(range(num_rows))
        self._num_started = num_rows
        self._was_plain = False
        self._start(np.arange(num_rows))
        # Answers are under way, all at different points.
        done = (np.random.default_rng([seed, 2]).random(num_rows) * self._left).astype(np.intp)
        self._contexts += done
        self._left -= done
        self.totals = Totals()
        self.clear_totals()

    def clear_totals(self) -> None:
        """Counting begins here."""
        classes = (np.zeros(self._num_classes, np.intp) for _ in range(3))
        self.totals = Totals(0, 0, 0, 0, 0, 0, 0, 0.0, *classes)

    def _start(self, rows: Ints) -> None:
        sizes = self._stream.start(rows)
        self._contexts[rows], self._left[rows] = sizes.prompt_lens + 1, np.maximum(1, sizes.answer_lens)
        self._class_ids[rows] = sizes.class_ids
        for row, context in zip(rows.tolist(), self._contexts[rows].tolist(), strict=True):
            if self._scheduling is not None:
                self._scheduling.gate.begin(row, context)
            self._keys[row] = self._num_started
            self._num_started += 1

    def step(self, time_factor: float = 1.0) -> None:
        """One step of every row. It takes `time_factor` times what the table says."""
        num_rows = self._contexts.size
        context = float(self._contexts.sum())
        shape = StepShape(num_rows, num_rows, context, num_rows, context)
        verified, accepted = np.zeros(num_rows, np.intp), np.zeros(num_rows, np.intp)
        drafted = self._draft(shape, verified, accepted) if self._scheduling is not None else None
        num_verified = int(verified.sum())
        num_drafted, num_slots = (
            (len(drafted.decision.rows), drafted.decision.num_slots) if drafted is not None else (0, 0)
        )
        read = context + float(verified @ self._contexts)
        work = StepWork(num_rows, num_drafted, num_rows + num_verified, read, num_slots)
        draft_ns = time_factor * self._costs.draft_ns(num_drafted, num_slots)
        step_ns = time_factor * float(self._costs.step_ns(work, _NO_CONTEXTS)[0])
        self._observe(shape, work, drafted, step_ns, draft_ns)
        tokens = np.minimum(accepted + 1, self._left)
        self._count(tokens, verified, accepted, num_drafted * num_slots, num_drafted, step_ns + draft_ns)
        self._contexts += tokens
        self._left -= tokens
        ended = np.flatnonzero(self._left == 0)
        if ended.size:
            self._start(ended)

    def _draft(self, shape: StepShape, verified: Ints, accepted: Ints) -> _Drafted | None:
        """Drafts what the gate says and fills in what becomes of it."""
        assert self._scheduling is not None
        gate, policy, _ = self._scheduling
        able = np.flatnonzero(self._left > 1)
        limits = np.minimum(self._block_size, self._left[able] - 1)
        candidates = Candidates(able, self._contexts[able], limits)
        decision = gate.decide(shape, candidates)
        gate.drafting(candidates, decision)
        if not decision.rows:
            return None
        rows = able[decision.rows]
        max_drafts = np.minimum(decision.num_slots, limits[decision.rows])
        blocks = self._stream.draft(rows)
        windows = policy.windows(
            DraftedBatch(
                confidences=blocks.confidences[:, : decision.num_slots],
                max_drafts=max_drafts.tolist(),
                num_emitting=shape.num_rows,
                num_tokens=shape.num_tokens,
                row_keys=[self._keys[row] for row in rows.tolist()],
                contexts=self._contexts[rows].tolist(),
                num_rows=shape.num_rows,
                num_context=shape.num_context,
            )
        )
        verified[rows] = windows.verify_lens
        accepted[rows] = np.minimum(blocks.num_accepted, np.minimum(windows.verify_lens, windows.commit_lens))
        confidences = blocks.confidences[:, : decision.num_slots]
        return _Drafted(decision, DraftedRounds(rows, max_drafts, verified[rows], accepted[rows], confidences))

    def _observe(
        self, shape: StepShape, work: StepWork, drafted: _Drafted | None, step_ns: float, draft_ns: float
    ) -> None:
        """Tells the scheduling what the step did, as `StepEngine` does."""
        if self._scheduling is None:
            return
        gate, _, costs = self._scheduling
        elapsed_ns = round(step_ns + draft_ns)
        if drafted is None:
            gate.observe_plain(shape, elapsed_ns, is_steady=self._was_plain, is_disturbed=not self._was_plain)
        else:
            gate.observe_drafted(shape, drafted.decision, drafted.rounds, elapsed_ns, is_steady=True)
        if costs is not None and (drafted is not None or self._was_plain):
            costs.observe(work, step_ns=step_ns, draft_ns=draft_ns)
        self._was_plain = drafted is None

    def _count(self, tokens: Ints, verified: Ints, accepted: Ints, num_slots: int, num_drafted: int, ns: float) -> None:
        totals = self.totals
        totals.num_steps += 1
        totals.num_rounds += tokens.size
        totals.num_tokens += int(tokens.sum())
        totals.num_drafted_rows += num_drafted
        totals.num_slots += num_slots
        totals.num_verified += int(verified.sum())
        totals.num_accepted += int(accepted.sum())
        totals.ns += ns
        np.add.at(totals.class_tokens, self._class_ids, tokens)
        np.add.at(totals.class_rounds, self._class_ids, 1)
        np.add.at(totals.class_verified, self._class_ids, verified)


class _Drafted(NamedTuple):
    decision: DraftDecision
    rounds: DraftedRounds


def time_factors(num_steps: int, noise: float, drift: float, seed: int) -> Floats:
    """[steps] of a machine whose steps vary by `noise` (standard deviation of the logarithm) and whose speed swings by
    `drift` (of the logarithm) over a thousand steps."""
    dice = np.random.default_rng([seed, 3])
    swing = np.sin(2 * np.pi * (np.arange(num_steps) / 1000 + dice.random()))
    factors: Floats = np.exp(noise * dice.standard_normal(num_steps) + drift * swing)
    return factors
