"""Prometheus metrics of a process: what is exported is declared, and read from the counters that exist at scrape time.

Nothing here is global: each process makes one registry and hands it around. A scrape changes nothing, so that any
number of scrapers see the same totals.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

VLLM_PREFIX = "vllm:"
"""Names that other servers use too; their samples get the labels engine and model_name at the gateway."""
SERVICE_LABEL = "service"

Labels = tuple[str, ...]


@dataclass(frozen=True)
class MetricSpec:
    """What one exported family means."""

    name: str
    """As in queries; counters end in _total."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    """One sentence, with the unit."""
    labels: Labels = ()

    def of(self, value: float) -> Metric:
        """The family of a metric without labels."""
        return self.by_label({(): value})

    def by_label(self, values: Mapping[Labels, float]) -> Metric:
        """The family with a sample for each tuple of label values."""
        family_class = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = family_class(self.name, self.help, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family

    def distribution(self, histograms: Mapping[Labels, Histogram]) -> Metric:
        """The family of histograms."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for labels, histogram in histograms.items():
            buckets, total = histogram.snapshot()
            family.add_metric(labels, buckets, total)
        return family


class Histogram:
    """Counts by bucket. Observed from one thread; a scrape from another sees whole observations of each counter."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends of the buckets, rising; what is above the last one is counted as well."""
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` observations of the same value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets by upper end, and the sum."""
        cumulative = itertools.accumulate(map(float, self._counts.copy()))
        return list(zip((*map(str, self._bounds), "+Inf"), cumulative, strict=True)), self._sum


class _Families(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


PROCESS_SPECS = (
    MetricSpec(
        "process_cpu_seconds_total", "counter", "User and system CPU time of the process, seconds.", ("service",)
    ),
    MetricSpec("process_resident_memory_bytes", "gauge", "Memory of the process in RAM, bytes.", ("service",)),
    MetricSpec("process_virtual_memory_bytes", "gauge", "Address space of the process, bytes.", ("service",)),
    MetricSpec("process_start_time_seconds", "gauge", "When the process started, Unix time, seconds.", ("service",)),
    MetricSpec("process_open_fds", "gauge", "Open file descriptors.", ("service",)),
    MetricSpec("process_max_fds", "gauge", "Most file descriptors that may be open.", ("service",)),
)
"""Of every process; on Linux alone."""


def new_registry(process: str, *collects: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """The registry of a process. `process` labels its CPU time and memory; `collects` yield families when scraped."""
    registry = CollectorRegistry(auto_describe=False)
    own = ProcessCollector(registry=None)
    registry.register(_Families(lambda: _process_families(process, own)))
    for collect in collects:
        registry.register(_Families(collect))
    return registry


def _process_families(process: str, collector: ProcessCollector) -> Iterator[Metric]:
    found = {sample.name: sample.value for family in collector.collect() for sample in family.samples}
    for spec in PROCESS_SPECS:
        if spec.name in found:
            yield spec.by_label({(process,): found[spec.name]})


def exposition(registry: Collector) -> str:
    """Everything a registry has, in Prometheus's text format."""
    return generate_latest(registry).decode()


def exposition_of(*families: Metric) -> str:
    """A few families, in the same format."""
    return exposition(_Families(lambda: families))
