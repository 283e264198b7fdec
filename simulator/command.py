"""`dspark simulate`: from options to files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from service_kit.errors import ConfigurationError
from simulator.cost_table import CostTable, load_table
from simulator.modes import MODES
from simulator.population import Floats, Population
from simulator.replay import TracePopulation, time_factors
from simulator.report import plot_rows, verdicts, write_rows
from simulator.sweep import Row, SweepOptions, predicted_ns, sweep
from simulator.synthetic import TRAFFIC, SyntheticPopulation


class SimulateOptions(NamedTuple):
    """Options of `dspark simulate`."""

    tables: Sequence[str]
    """Shipped names or files."""
    modes: Sequence[str]
    traces: Sequence[Path] = ()
    traffic: str = "published"
    """Synthetic requests, where no trace is given."""
    block_size: int = 7
    confidence_temperature: float = 1.0
    out: Path = Path("simulated")
    sweep: SweepOptions = SweepOptions()


def run_simulate(options: SimulateOptions, console: Console) -> list[Row]:
    """Simulates, writes a CSV, a JSON and a PNG for each table, and prints the rows. Raises ConfigurationError."""
    tables = [load_table(name) for name in options.tables]
    population = _population(options)
    everything = []
    for table in tables:
        how = options.sweep
        if isinstance(population, TracePopulation):
            how = replace(how, recorded=_recorded(table, population, console))
        with console.status("") as status:
            rows = sweep([MODES[name] for name in options.modes], table, population, how, status.update)
        everything += rows
        written = write_rows(rows, options.out, f"simulated-{table.name}")
        plot = options.out / f"simulated-{table.name}.png"
        plot_rows(rows, f"{table.name}: {', '.join(population.class_names)}", plot)
        _print(rows, console)
        for line in verdicts(rows):
            console.print(line, soft_wrap=True)
        console.print(f"{', '.join(map(str, [*written, plot]))} written", style="bold green", soft_wrap=True)
    return everything


def _population(options: SimulateOptions) -> Population:
    if options.traces:
        if options.confidence_temperature != 1.0:
            raise ConfigurationError("a confidence temperature is for synthetic requests: leave it out with a trace")
        return TracePopulation(options.traces)
    return SyntheticPopulation(TRAFFIC[options.traffic], options.block_size, options.confidence_temperature)


def _recorded(table: CostTable, population: TracePopulation, console: Console) -> Floats:
    """Time factors of the traces, and in words how the table fits them."""
    predicted = [predicted_ns(table, step.work) for step in population.steps]
    measured = sum(step.step_ns for step in population.steps)
    factors = time_factors(population.steps, predicted)
    console.print(
        f"{table.name}: {len(predicted)} recorded steps took {measured / sum(predicted):.2f} times what the table "
        f"says; around their median they vary by {100 * abs(factors - 1).mean():.1f} % (mean)",
        soft_wrap=True,
    )
    return factors


def _print(rows: Sequence[Row], console: Console) -> None:
    console.print(
        f"{'mode':>22} {'rows':>5} {'tokens/s':>10} {'of one':>8} {'a round':>8} {'budget':>7} {'drafted':>8} "
        f"{'/ off':>7} {'/ best':>7}",
        soft_wrap=True,
    )
    for row in rows:
        console.print(
            f"{row.mode:>22} {row.concurrency:5d} {row.tokens_s:10.1f} {row.user_tokens_s:8.2f} "
            f"{row.tokens_round:8.2f} {row.budget:7.2f} {row.drafted_len:8.2f} {row.gain_off:7.3f} "
            f"{row.gain_best:7.3f}",
            highlight=False,
            soft_wrap=True,
        )
