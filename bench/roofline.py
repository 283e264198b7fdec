"""Every phase of a step beside what the machine gives at best.

    dspark bench roofline [--model DIR] [--drafter DIR] [--formats q4,fp16] [--contexts 128,512,2048]

A phase's floor is the larger of its bytes (weights, and the K/V of its contexts) over the measured read bandwidth, and
its multiply-adds over the measured peaks: of bytes for weights kept as levels, of float32 for all else. Phases are
measured in turn, so that a slow minute meets all alike; a row is the best of its repeats.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.peaks import Peaks, measure_peaks
from drafter_service.loading import load_drafter
from drafter_service.model import DrafterModel
from drafter_service.settings import DrafterSettings
from kernels.cpu.native import num_threads
from launcher.models import choose_models
from launcher.settings import LauncherSettings
from service_kit.cpu import cpu_name
from service_kit.settings import CommonSettings, load_settings
from verifier_service.loading import load_target
from verifier_service.model import PAGE_SIZE, TargetModel, TokenRows
from verifier_service.settings import VerifierSettings


class Phase(NamedTuple):
    """One kind of forward: `num_slots` contexts, the last `num_rows` positions of each computed."""

    name: str
    num_slots: int
    num_rows: int
    num_emitting: int
    """Rows of a slot that go through lm_head."""


PHASES = (
    Phase("decode, 1 row", 1, 1, 1),
    Phase("decode, 8 slots", 8, 1, 1),
    Phase("decode, 16 slots", 16, 1, 1),
    Phase("verify, window of 4", 1, 4, 4),
    Phase("verify, window of 8", 1, 8, 8),
    Phase("verify, 8 windows of 4", 8, 4, 4),
    Phase("prefill chunk of 128", 1, 128, 1),
)
BLOCKS = (("draft, 1 block", 1), ("draft, 8 blocks", 8))


class Cost(NamedTuple):
    """What a phase cannot do without."""

    num_bytes: int
    level_macs: int
    float_macs: int

    def floor_ms(self, peaks: Peaks) -> float:
        """Milliseconds at the machine's best."""
        compute = self.level_macs / peaks.int8_macs_per_second + self.float_macs / peaks.float_macs_per_second
        return 1e3 * max(self.num_bytes / peaks.bytes_per_second, compute)


class Row(NamedTuple):
    """One line of the table."""

    weights: str
    phase: str
    context: int
    cost: Cost
    measured_ms: float


def target_cost(model: TargetModel, phase: Phase, context: int, is_levels: bool) -> Cost:
    """Bytes and multiply-adds of a phase."""
    config, weights = model.config, model.weights
    layers = [linear for linear in weights.linears if linear is not weights.lm_head]
    rows = phase.num_slots * phase.num_rows
    linear_macs = rows * sum(linear.num_in * linear.num_out for linear in layers)
    linear_macs += phase.num_slots * phase.num_emitting * weights.lm_head.num_in * weights.lm_head.num_out
    width = config.num_layers * config.head_dim
    read = phase.num_slots * context * model.page_bytes // PAGE_SIZE
    first = context - phase.num_rows + 1
    seen = phase.num_slots * sum(range(first, context + 1))
    attention_macs = seen * width * 2 * config.num_heads
    return Cost(
        sum(linear.weight_bytes for linear in weights.linears) + read,
        linear_macs if is_levels else 0,
        attention_macs + (0 if is_levels else linear_macs),
    )


def target_step(model: TargetModel, phase: Phase, context: int) -> Callable[[], object]:
    """A forward of the phase with its logits, over pages of its own."""
    pages = -(-context // PAGE_SIZE)
    space = model.workspace(phase.num_slots * pages, context, phase.num_slots * phase.num_rows)
    _write(*space.keys, *space.values)
    page_table = torch.randperm(phase.num_slots * pages).int().view(phase.num_slots, pages)
    index = torch.arange(phase.num_slots * phase.num_rows)
    positions = context - phase.num_rows + index % phase.num_rows
    rows = TokenRows(100 + index, positions.int(), (index // phase.num_rows).int())
    emitting = index[index % phase.num_rows >= phase.num_rows - phase.num_emitting]

    def run() -> object:
        with torch.inference_mode():
            return model.logits(model.forward(rows, page_table, space)[emitting])

    return run


def draft_cost(model: DrafterModel, num_blocks: int, context: int, is_levels: bool) -> Cost:
    """Bytes and multiply-adds of one block pass and its head's base logits, without the sequential head."""
    config, weights = model.config, model.weights
    linears = [each for layer in weights.layers for each in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    linears.append(weights.lm_head)
    slots = num_blocks * config.block_len_for(config.block_size)
    width = config.num_layers * config.head_dim
    read = num_blocks * context * model.page_bytes // PAGE_SIZE
    linear_macs = slots * sum(linear.num_in * linear.num_out for linear in linears)
    attention_macs = slots * (context + config.block_size) * width * 2 * config.num_heads
    return Cost(
        sum(linear.weight_bytes for linear in linears) + read,
        linear_macs if is_levels else 0,
        attention_macs + (0 if is_levels else linear_macs),
    )


def draft_step(model: DrafterModel, num_blocks: int, context: int) -> Callable[[], object]:
    """A block pass over contexts of noise."""
    pages = -(-(context + model.config.block_size) // PAGE_SIZE)
    cache = model.make_cache(num_blocks * pages, context + model.config.block_size)
    _write(cache.keys, cache.values)
    page_table = torch.randperm(num_blocks * pages).int().view(num_blocks, pages)
    anchors, slots = torch.full((num_blocks,), 100), torch.arange(num_blocks, dtype=torch.int32)
    positions = torch.full((num_blocks,), context, dtype=torch.int32)

    def run() -> object:
        with torch.inference_mode():
            return model.forward_block(anchors, positions, slots, model.config.block_size, page_table, cache)

    return run


def _write(*pages: Tensor) -> None:
    """Gives K/V pages memory of their own: as long as nothing was written, all of them are one page of zeros."""
    for tensor in pages:
        tensor.normal_()


def best_ms(steps: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Best time of each step over `repeats` rounds, each round running all in turn."""
    best = [float("inf")] * len(steps)
    for round_ in range(repeats + 1):
        for place, step in enumerate(steps):
            started = time.perf_counter()
            step()
            if round_:
                best[place] = min(best[place], 1e3 * (time.perf_counter() - started))
    return best


def measure(model: Path, drafter: Path | None, formats: Sequence[str], contexts: Sequence[int]) -> Iterator[Row]:
    """Rows of every format, phase and context."""
    for weight_format in formats:
        target = load_target(VerifierSettings.model_validate({"model": str(model), "weight_format": weight_format}))
        is_levels = target.weight_format == "q4"
        for context in contexts:
            phases = [phase for phase in PHASES if phase.num_rows <= context]
            steps = [target_step(target.model, phase, context) for phase in phases]
            for phase, measured in zip(phases, best_ms(steps, _repeats(context)), strict=True):
                cost = target_cost(target.model, phase, context, is_levels)
                yield Row(target.weight_format, phase.name, context, cost, measured)
    if drafter is None:
        return
    loaded = load_drafter(DrafterSettings(model=str(drafter), target=str(model)))
    is_levels = str(loaded.weight_format) == "q8"
    for context in contexts:
        steps = [draft_step(loaded.model, num_blocks, context) for _, num_blocks in BLOCKS]
        for (name, num_blocks), measured in zip(BLOCKS, best_ms(steps, 20), strict=True):
            cost = draft_cost(loaded.model, num_blocks, context, is_levels)
            yield Row(f"drafter {loaded.weight_format}", name, context, cost, measured)


def _repeats(context: int) -> int:
    return 4 if context > 1024 else 10


def print_rows(rows: Sequence[Row], peaks: Peaks, console: Console) -> None:
    """The table."""
    console.print(
        f"{cpu_name()}, {num_threads()} threads: reads {peaks.bytes_per_second / 1e9:.1f} GB/s, float32 "
        f"{peaks.float_macs_per_second / 1e9:.0f} and int8 {peaks.int8_macs_per_second / 1e9:.0f} G multiply-adds/s"
    )
    table = Table("weights", "phase", "context", "MB", "G mul-adds", "floor ms", "measured ms", "of floor")
    for row in rows:
        cost, floor = row.cost, row.cost.floor_ms(peaks)
        macs = (cost.level_macs + cost.float_macs) / 1e9
        figures = f"{cost.num_bytes / 1e6:.0f}", f"{macs:.2f}", f"{floor:.1f}", f"{row.measured_ms:.1f}"
        table.add_row(row.weights, row.phase, str(row.context), *figures, f"{row.measured_ms / floor:.2f}")
    console.print(table)


def as_json(rows: Sequence[Row], peaks: Peaks) -> dict[str, Any]:
    """All of it, for a file."""
    lines = [
        {
            "weights": row.weights,
            "phase": row.phase,
            "context": row.context,
            **row.cost._asdict(),
            "floor_ms": row.cost.floor_ms(peaks),
            "measured_ms": row.measured_ms,
        }
        for row in rows
    ]
    return {"device": cpu_name(), "threads": num_threads(), "peaks": peaks._asdict(), "rows": lines}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="dspark bench roofline")
    parser.add_argument("--model", help="target: directory or hub id; default: the embedded one")
    parser.add_argument("--drafter", help="drafter: directory, hub id or none")
    parser.add_argument("--formats", default="q4,fp16", help="weight formats of the target")
    parser.add_argument("--contexts", default="128,512,2048")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    contexts = [int(context) for context in options.contexts.split(",")]
    pair = choose_models(options.model, options.drafter, load_settings(CommonSettings), load_settings(LauncherSettings))
    console = Console()
    with console.status("measuring") as status:
        rows = []
        for row in measure(pair.target, pair.drafter, options.formats.split(","), contexts):
            rows.append(row)
            status.update(f"{row.weights}, context {row.context}: {row.phase} {row.measured_ms:.1f} ms")
        peaks = measure_peaks()  # after the models have set the threads
    print_rows(rows, peaks, console)
    if options.out:
        options.out.write_text(json.dumps(as_json(rows, peaks), indent=1) + "\n")


if __name__ == "__main__":
    main()
