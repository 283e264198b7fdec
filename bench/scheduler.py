"""`dspark bench scheduler`: what a step costs outside the executors, on the step's critical path.

The real step engine, planner, guard, policy, audits, calibration, bookkeeping and messages (protobuf included) run over
executors that answer at once. It is the CPU time of the step thread; what making up the answers takes is left out, and
so are the sockets' own system calls. On the critical path is what runs while no executor has a call. The rest
(learning, and all of a plain step, which is sent behind another) delays nobody while it takes less time than the call.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from dspark.v1 import drafter_pb2, verifier_pb2
from rich.console import Console

from bench.scheduler_fakes import InstantDrafter, InstantTransport, InstantVerifier, Waits
from kernels.sampling import Regime
from scheduler_service.admission import Limits, accept_request
from scheduler_service.batch import Batch
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.commit import Committer
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, StepShape
from scheduler_service.executors import DrafterClient, VerifierClient
from scheduler_service.guard import Guard
from scheduler_service.ledger import Ledger
from scheduler_service.policy import create_policy
from scheduler_service.request import GenerateSpec, SamplingOptions
from scheduler_service.step import StepEngine
from scheduler_service.step_trace import StepTrace
from simulator.cost_table import CostTable, load_table

_BLOCK = 7
_CONTEXT, _ANSWER = 4096, 2048


class _AlwaysDrafting(Guard):
    """Decides as the guard does where drafting pays, then drafts every row: the dearest step there is."""

    def look_ahead(self, shape: StepShape, candidates: Candidates) -> None:
        """The account is never empty, plain steps need no measuring, and there is always something new."""
        self.account, self._audit_left, self._look_again_at = 1.0, 0, 0
        super().look_ahead(shape, candidates)

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        """All rows, whole blocks."""
        super().decide(shape, candidates)
        count = candidates.num_rows
        return DraftDecision(list(range(count)), _BLOCK if count else 0)


class _NeverDrafting(Guard):
    """Decides as the guard does, then drafts nothing."""

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        """No row."""
        super().decide(shape, candidates)
        return NOTHING


class StepNs(NamedTuple):
    """CPU time of one step."""

    critical: int
    whole: int


class StepTimesMs(NamedTuple):
    """Of one kind of step."""

    kind: str
    num_rows: int
    critical: float
    """On the critical path, median."""
    p10: float
    """In all, least disturbed by others on the machine."""
    p50: float


class SchedulerBench:
    """A batch of `num_rows` requests that decode, and the engine that runs its steps."""

    def __init__(self, num_rows: int, table: CostTable, regime: Regime, *, is_drafting: bool) -> None:
        limits = Limits(
            max_num_seqs=num_rows,
            max_model_len=_CONTEXT,
            max_batch_tokens=num_rows * (_BLOCK + 1),
            num_pages=num_rows * _CONTEXT // 16,
            page_size=16,
            vocab_size=49_152,
            eos_token_ids=frozenset({0}),
            block_size=_BLOCK,
            feature_ring_rows=256,
        )
        self.batch, ledger, step_ids = Batch(limits, "isolated"), Ledger(), itertools.count(1)
        blocks = sorted({*table.model.block_draft_ns, _BLOCK})
        gate = _AlwaysDrafting if is_drafting else _NeverDrafting
        self.batch.draft_gate = gate(table.model, blocks)
        self._committer = Committer(self.batch, ledger, "", lambda request: None)
        self.batch.audit_share = 0.01
        self._waits = Waits()
        verifier = InstantTransport(InstantVerifier(1), verifier_pb2.StepResponse, self._waits)
        drafter = InstantTransport(InstantDrafter(2), drafter_pb2.DraftResponse, self._waits)
        costs, calibration = OnlineCosts(table.model), CalibrationMonitor(_BLOCK)
        self._engine = StepEngine(
            self.batch,
            self._committer,
            ledger,
            VerifierClient(verifier, 1.0),
            DrafterClient(drafter, 1.0),
            create_policy("compact", costs),
            step_ids,
            self._deliver,
            chain_plain_steps=True,
            trace=StepTrace(None),
            costs=costs,
            observers=(calibration,),
            calibration=calibration,
        )
        dice = np.random.default_rng(3)
        for index in range(num_rows):
            prompt = dice.integers(10, 40_000, int(dice.integers(20, 200))).tolist()
            temperature = 0.0 if regime is Regime.GREEDY else 1.0
            options = SamplingOptions(temperature, seed=index if regime is Regime.COUPLED else None)
            spec = GenerateSpec(f"r{index}", prompt, options, _ANSWER, ignore_eos=True)
            self.batch.enqueue(accept_request(spec, limits, lambda event: None))
        while any(not sequence.num_tokens for sequence in self.batch.running) or not self.batch.running:
            list(self.batch.admit())
            self._engine.run()

    def _deliver(self) -> None:
        for sink, event in self._committer.take_events():
            sink(event)

    def step_ns(self) -> StepNs:
        """One step, its executors left out."""
        own, waited, started = self._waits.own_ns, self._waits.total_ns, time.thread_time_ns()
        self._engine.run()
        elapsed = time.thread_time_ns() - started - (self._waits.own_ns - own)
        return StepNs(elapsed - (self._waits.total_ns - waited), elapsed)


def measure(num_rows: int, table: CostTable, regime: Regime, num_steps: int, *, is_drafting: bool) -> StepTimesMs:
    """Steps of one kind."""
    bench = SchedulerBench(num_rows, table, regime, is_drafting=is_drafting)
    critical, whole = np.array([bench.step_ns() for _ in range(num_steps)]).T / 1e6
    kind = f"{'drafted' if is_drafting else 'plain'}, {regime.name.lower()}"
    p10, p50 = np.percentile(whole, (10, 50)).tolist()
    return StepTimesMs(kind, num_rows, float(np.median(critical)), p10, p50)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row for each kind of step and number of rows."""
    parser = argparse.ArgumentParser(prog="dspark bench scheduler")
    parser.add_argument("--rows", default="1,32,256", help="comma-separated")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--table", default="cpu", help="costs to decide by: cpu, gpu-like or a file of dspark profile")
    parser.add_argument("--profile", action="store_true", help="print where the time of drafted steps goes")
    options = parser.parse_args(arguments)
    table = load_table(options.table)
    console = Console(highlight=False)
    for num_rows in map(int, options.rows.split(",")):
        for regime, is_drafting in ((Regime.GREEDY, False), (Regime.GREEDY, True), (Regime.REJECTION, True)):
            row = measure(num_rows, table, regime, options.steps, is_drafting=is_drafting)
            console.print(
                f"{row.num_rows:5d} rows, {row.kind:20} critical path p50 {row.critical:6.2f} ms, "
                f"in all p10 {row.p10:6.2f} p50 {row.p50:6.2f} ms of CPU",
                soft_wrap=True,
            )
        if options.profile:
            bench = SchedulerBench(num_rows, table, Regime.GREEDY, is_drafting=True)
            profiler = cProfile.Profile(time.thread_time)
            profiler.enable()
            for _ in range(options.steps):
                bench.step_ns()
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
