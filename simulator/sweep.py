"""Modes side by side at many batch sizes: the same requests, the same machine noise, several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from scheduler_service.policy import StepWork
from simulator.cost_table import CostTable
from simulator.engine import SimulatedEngine, Totals, time_factors
from simulator.modes import BASELINES, Mode
from simulator.population import Floats, Population


@dataclass(frozen=True)
class SweepOptions:
    """How much to simulate."""

    concurrencies: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
    num_rounds: int = 20_000
    """Row steps of each run, as far as the bounds on its steps allow: fewer rows take more steps."""
    min_steps: int = 150
    max_steps: int = 2_000
    num_seeds: int = 3
    noise: float = 0.05
    drift: float = 0.0
    recorded: Floats | None = None
    """Recorded time factors to use in place of those two."""


class Row(NamedTuple):
    """A mode at a concurrency: means over the seeds."""

    table: str
    mode: str
    concurrency: int
    tokens_s: float
    """Of all rows together."""
    spread: float
    """Standard deviation of one seed's `tokens_s`, relative."""
    user_tokens_s: float
    """Of one row."""
    tokens_round: float
    """Tokens committed of a row in a step."""
    budget: float
    """Drafts verified of a row in a step."""
    drafted_len: float
    """Slots drafted of a row in a step, rows that were not drafted included."""
    drafted_share: float
    """Rows drafted."""
    acceptance: float
    """Of verified drafts."""
    gain_off: float
    """Throughput over that of `off`; NaN where that was not simulated."""
    gain_off_spread: float
    """Standard deviation of it from seed to seed: requests and noise are the same ones."""
    gain_best: float
    """Throughput over that of the best baseline here."""
    gain_best_spread: float


def run(
    mode: Mode, table: CostTable, population: Population, concurrency: int, seed: int, options: SweepOptions
) -> Totals:
    """One run; what was learned before it began does not count."""
    num_steps = max(options.min_steps, min(options.max_steps, options.num_rounds // concurrency))
    num_warm = max(50, num_steps // 4)
    scheduling = mode.scheduling(table.model, population.block_size, block_sizes(table, population))
    engine = SimulatedEngine(table.model, population, concurrency, seed, scheduling)
    if options.recorded is not None:
        factors = np.resize(np.roll(options.recorded, -seed), num_warm + num_steps)
    else:
        factors = time_factors(num_warm + num_steps, options.noise, options.drift, seed)
    for index, factor in enumerate(factors.tolist()):
        if index == num_warm:
            engine.clear_totals()
        engine.step(factor)
    return engine.totals


def block_sizes(table: CostTable, population: Population) -> list[int]:
    """Blocks that can be drafted: those the table has a cost for, and whole ones."""
    return sorted(
        {each for each in table.model.block_draft_ns if each < population.block_size} | {population.block_size}
    )


def sweep(
    modes: Sequence[Mode],
    table: CostTable,
    population: Population,
    options: SweepOptions,
    on_progress: Callable[[str], None] = lambda done: None,
) -> list[Row]:
    """All modes at all concurrencies."""
    rows = []
    for concurrency in options.concurrencies:
        totals = {}
        for mode in modes:
            totals[mode.name] = [
                run(mode, table, population, concurrency, seed, options) for seed in range(options.num_seeds)
            ]
            on_progress(f"{table.name}: {mode.name} at {concurrency}")
        speeds = {name: [1e9 * each.num_tokens / each.ns for each in runs] for name, runs in totals.items()}
        baselines = [name for name in BASELINES if name in speeds]
        best = max(baselines, key=lambda name: fmean(speeds[name]), default=None)
        for name, runs in totals.items():
            off, against_best = _gain(speeds, name, "off"), _gain(speeds, name, best)
            rounds = sum(each.num_rounds for each in runs)
            speed = fmean(speeds[name])
            verified = sum(each.num_verified for each in runs)
            rows.append(
                Row(
                    table=table.name,
                    mode=name,
                    concurrency=concurrency,
                    tokens_s=speed,
                    spread=_spread(speeds[name]) / speed,
                    user_tokens_s=speed / concurrency,
                    tokens_round=sum(each.num_tokens for each in runs) / rounds,
                    budget=verified / rounds,
                    drafted_len=sum(each.num_slots for each in runs) / rounds,
                    drafted_share=sum(each.num_drafted_rows for each in runs) / rounds,
                    acceptance=sum(each.num_accepted for each in runs) / max(1, verified),
                    gain_off=fmean(off),
                    gain_off_spread=_spread(off),
                    gain_best=fmean(against_best),
                    gain_best_spread=_spread(against_best),
                )
            )
    return rows


def predicted_ns(table: CostTable, work: StepWork) -> float:
    """What the table says of a step that was run."""
    return float(table.model.total_ns(work, np.empty(0))[0])


def _gain(speeds: dict[str, list[float]], name: str, other: str | None) -> list[float]:
    """Seed by seed."""
    if other not in speeds:
        return [float("nan")]
    return [mine / theirs for mine, theirs in zip(speeds[name], speeds[other], strict=True)]


def _spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else float("nan")
