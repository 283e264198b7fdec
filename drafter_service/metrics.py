"""The drafter's metrics: what its calls did, and where their time went. Names: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric

from drafter_service.records import DraftResult, DraftWork
from service_kit.metrics import MetricSpec

_CALLS = MetricSpec("dspark_drafter_calls_total", "counter", "Draft calls that the drafter ran.")
_ROWS = MetricSpec("dspark_drafter_rows_total", "counter", "Blocks drafted in those calls.")
_INGESTED = MetricSpec("dspark_drafter_ingested_positions_total", "counter", "Positions whose features were ingested.")
_FAILED = MetricSpec("dspark_drafter_failed_ingests_total", "counter", "Ingests refused for a stale feature row.")
_PHASES = MetricSpec(
    "dspark_drafter_phase_seconds_total",
    "counter",
    "Time of a call's phases in the drafter, seconds; total is all of it.",
    ("phase",),
)
_ARENAS = MetricSpec("dspark_drafter_arena_bytes", "gauge", "Shared memory that the drafter owns, bytes.", ("arena",))
_PAGES = MetricSpec("dspark_drafter_page_bytes", "gauge", "Memory of the draft K/V pages, bytes.")

SPECS = (_CALLS, _ROWS, _INGESTED, _FAILED, _PHASES, _ARENAS, _PAGES)
"""Every family of the drafter."""


@dataclass
class DraftCounts:
    """Written by whoever has the engine; read by anybody."""

    num_calls: int = 0
    num_rows: int = 0
    num_ingested: int = 0
    num_failed_ingests: int = 0
    phase_ns: dict[str, int] = field(default_factory=dict)

    def add(self, work: DraftWork, result: DraftResult) -> None:
        """A call has ended."""
        self.num_calls += 1
        self.num_rows += len(work.rows.slots)
        self.num_ingested += int(work.ingests.counts.sum())
        self.num_failed_ingests += len(result.ingest_failures)
        for name, duration_ns in result.timings._asdict().items():
            self.phase_ns[name] = self.phase_ns.get(name, 0) + duration_ns


def drafter_metrics(counts: DraftCounts, arena_bytes: Mapping[str, int], page_bytes: int) -> Iterator[Metric]:
    """A snapshot; sizes are those of the session."""
    yield _CALLS.of(counts.num_calls)
    yield _ROWS.of(counts.num_rows)
    yield _INGESTED.of(counts.num_ingested)
    yield _FAILED.of(counts.num_failed_ingests)
    yield _PHASES.by_label({(name,): ns / 1e9 for name, ns in counts.phase_ns.copy().items()})
    yield _ARENAS.by_label({(name,): size for name, size in arena_bytes.items()})
    yield _PAGES.of(page_bytes)
