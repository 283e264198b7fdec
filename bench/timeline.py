"""Where consecutive steps spend their time: a plot, and the gaps between forwards.

    dspark bench timeline FILE [--steps 20] [--out timeline.png]

FILE is what a scheduler with DSPARK_SCHEDULER_TRACE_STEPS wrote. A gap is the time from the end of one step's target
forward to the start of the next one's; with drafting, a draft pass lies in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from service_kit.errors import ConfigurationError

_FORWARD, _DRAFT = ("forward", "head"), "draft_call"
_LANES = ("draft_call", "step_call", "forward", "features", "head", "accept", "commit")
_IDLE_MS = 100.0
"""A pause longer than this had no work; it is no gap."""


class Phase(NamedTuple):
    """One phase of one step, in nanoseconds of the monotonic clock."""

    step_id: int
    name: str
    start_ns: int
    end_ns: int


class Gaps(NamedTuple):
    """Milliseconds between forwards, beside the steps' own length."""

    num_gaps: int
    p50_ms: float
    p95_ms: float
    step_ms: float
    """Median from one forward's start to the next one's."""


def read_trace(path: Path) -> list[Phase]:
    """The file's phases in the order they began. Raises ConfigurationError if it cannot be read."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        phases = [Phase(line["step_id"], line["phase"], line["start_ns"], line["end_ns"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: no trace of steps ({error}): give the file of trace_steps") from error
    return sorted(phases, key=lambda phase: phase.start_ns)


def forward_spans(phases: Iterable[Phase]) -> list[tuple[int, int]]:
    """(start, end) of each step's target model: from its forward's start to its head's end, in order."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for phase in phases:
        if phase.name in _FORWARD:
            starts[phase.step_id] = min(phase.start_ns, starts.get(phase.step_id, phase.start_ns))
            ends[phase.step_id] = max(phase.end_ns, ends.get(phase.step_id, 0))
    return sorted((starts[step_id], ends[step_id]) for step_id in starts)


def gaps_of(phases: Sequence[Phase]) -> Gaps:
    """Statistics of the gaps. Raises ConfigurationError if there are fewer than three steps."""
    spans = forward_spans(phases)
    pairs = list(itertools.pairwise(spans))
    gaps = [(after[0] - before[1]) / 1e6 for before, after in pairs]
    steps = [(after[0] - before[0]) / 1e6 for before, after in pairs]
    kept = [(gap, step) for gap, step in zip(gaps, steps, strict=True) if gap < _IDLE_MS]
    if len(kept) < 2:
        raise ConfigurationError("the trace has fewer than three steps in a row: generate some tokens first")
    ordered = sorted(gap for gap, _ in kept)
    return Gaps(
        len(ordered),
        statistics.median(ordered),
        ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
        statistics.median(step for _, step in kept),
    )


def plot(phases: Sequence[Phase], num_steps: int, path: Path) -> None:
    """Draws `num_steps` consecutive steps from the middle of the trace, a lane for each kind of phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    step_ids = sorted({phase.step_id for phase in phases if phase.name == "forward"})
    first = max(0, (len(step_ids) - num_steps) // 2)
    chosen = set(step_ids[first : first + num_steps])
    shown = [phase for phase in phases if phase.step_id in chosen]
    origin = min(phase.start_ns for phase in shown)
    lanes = [name for name in _LANES if any(phase.name == name for phase in shown)]
    figure, axes = pyplot.subplots(figsize=(14, 0.6 * len(lanes) + 1.2))
    for lane, name in enumerate(lanes):
        bars = [
            ((phase.start_ns - origin) / 1e6, (phase.end_ns - phase.start_ns) / 1e6)
            for phase in shown
            if phase.name == name
        ]
        axes.broken_barh(bars, (lane - 0.4, 0.8), color=f"C{lane}", edgecolor="white", linewidth=0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{len(chosen)} consecutive steps")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the gaps and writes the plot."""
    parser = argparse.ArgumentParser(prog="dspark bench timeline")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("timeline.png"))
    options = parser.parse_args(arguments)
    phases = read_trace(options.trace)
    gaps = gaps_of(phases)
    Console().print(
        f"{gaps.num_gaps} gaps between forwards: p50 {gaps.p50_ms:.2f} ms, p95 {gaps.p95_ms:.2f} ms; from forward to "
        f"forward p50 {gaps.step_ms:.2f} ms"
    )
    plot(phases, options.steps, options.out)
    Console().print(f"{options.out} written")


if __name__ == "__main__":
    main()
