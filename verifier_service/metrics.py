"""The verifier's metrics: what its steps did, and where their time went. Names: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from service_kit.metrics import MetricSpec
from verifier_service.steps import StepBatch, StepResult

_STEPS = MetricSpec("dspark_verifier_steps_total", "counter", "Steps that the verifier ran.")
_ROWS = MetricSpec("dspark_verifier_rows_total", "counter", "Rows of those steps: prefill chunks and verify windows.")
_TOKEN_ROWS = MetricSpec("dspark_verifier_token_rows_total", "counter", "Token rows of those steps, drafts included.")
_FAILED = MetricSpec("dspark_verifier_failed_rows_total", "counter", "Rows that could not be served.")
_PHASES = MetricSpec(
    "dspark_verifier_phase_seconds_total",
    "counter",
    "Time of a step's phases in the verifier, seconds; total is all of it.",
    ("phase",),
)
_ARENAS = MetricSpec("dspark_verifier_arena_bytes", "gauge", "Shared memory that the verifier owns, bytes.", ("arena",))
_PAGES = MetricSpec("dspark_verifier_page_bytes", "gauge", "Memory of the target's K/V pages, bytes.")

SPECS = (_STEPS, _ROWS, _TOKEN_ROWS, _FAILED, _PHASES, _ARENAS, _PAGES)
"""Every family of the verifier."""


@dataclass
class StepCounts:
    """Written by whoever has the engine; read by anybody."""

    num_steps: int = 0
    num_rows: int = 0
    num_token_rows: int = 0
    num_failed_rows: int = 0
    phase_ns: dict[str, int] = field(default_factory=dict)

    def add(self, batch: StepBatch, result: StepResult) -> None:
        """A step has ended."""
        self.num_steps += 1
        self.num_rows += len(batch.row_slots)
        # Drafts of blocks are told by what came of them.
        self.num_token_rows += len(batch.token_ids) + (sum(result.accepted.verify_lens) if batch.blocks else 0)
        self.num_failed_rows += len(result.accepted.failures)
        for phase in result.phases:
            self.phase_ns[phase.name] = self.phase_ns.get(phase.name, 0) + phase.end_ns - phase.start_ns


def verifier_metrics(counts: StepCounts, arena_bytes: Mapping[str, int], page_bytes: int) -> Iterator[Metric]:
    """A snapshot; sizes are those of the session."""
    yield _STEPS.of(counts.num_steps)
    yield _ROWS.of(counts.num_rows)
    yield _TOKEN_ROWS.of(counts.num_token_rows)
    yield _FAILED.of(counts.num_failed_rows)
    yield _PHASES.by_label({(name,): ns / 1e9 for name, ns in counts.phase_ns.copy().items()})
    yield _ARENAS.by_label({(name,): size for name, size in arena_bytes.items()})
    yield _PAGES.of(page_bytes)
