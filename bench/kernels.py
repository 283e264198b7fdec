"""Where a target's forward spends its time: each kind of kernel alone, beside the whole.

    dspark bench kernels [--model DIR] [--formats q4,fp16] [--contexts 128,512,2048] [--rows 1,4,8,16,64]

Milliseconds of all layers, best of repeats measured in turn. Kernels are recorded as a forward records them, so that no
Python lies between them. "whole / linears" is the forward, without lm_head, over its linear layers alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench.roofline import best_ms
from kernels.cpu.native import num_threads
from kernels.cpu.program import Program, recording
from launcher.models import choose_models
from launcher.settings import LauncherSettings
from service_kit.cpu import cpu_name
from service_kit.settings import CommonSettings, load_settings
from verifier_service.loading import load_target
from verifier_service.model import PAGE_SIZE, TargetModel, TokenRows, Workspace
from verifier_service.settings import VerifierSettings

_REPEATS = 12


class Split(NamedTuple):
    """Milliseconds of all layers, for `num_rows` rows at the end of one context."""

    weights: str
    num_rows: int
    context: int
    linears: float
    attention: float
    norms: float
    silu: float
    forward: float
    lm_head: float

    @property
    def ratio(self) -> float:
        """The forward over its linear layers."""
        return self.forward / self.linears


def _parts(model: TargetModel, rows: TokenRows, pages: torch.Tensor, space: Workspace) -> list[Callable[[], object]]:
    """Recordings in the order of Split's fields."""
    config, ops, eps = model.config, model._ops, model.config.rms_norm_eps
    buffers = space.residual, space.normed, space.qkv, space.attended, space.delta, space.gate_up, space.activated
    residual, normed, qkv, attended, delta, gate_up, activated = (part[: len(rows.token_ids)] for part in buffers)

    def linears() -> None:
        for layer in model.weights.layers:
            layer.qkv(normed, qkv)
            layer.output(attended, delta)
            layer.gate_up(normed, gate_up)
            layer.down(activated, delta)

    def attention() -> None:
        for index, layer in enumerate(model.weights.layers):
            place = rows.positions, rows.slots, pages, space.cos, space.sin, space.keys[index], space.values[index]
            ops.paged_attention(qkv, *place, layer.q_norm, layer.k_norm, eps, config.windows[index], attended)

    def norms() -> None:
        for layer in model.weights.layers:
            ops.add_rms_norm(residual, delta, layer.post_attention_norm, eps, normed)
            ops.add_rms_norm(residual, delta, layer.input_norm, eps, normed)

    def silu() -> None:
        for _ in model.weights.layers:
            ops.silu_mul(gate_up, activated)

    programs: list[Callable[[], object]] = []
    for part in (linears, attention, norms, silu):
        with recording() as made:
            part()
        programs.append(Program(made).run)
    return programs


def split(model: TargetModel, weights: str, num_rows: int, context: int) -> Split:
    """Measures one shape."""
    num_pages = -(-context // PAGE_SIZE)
    space = model.workspace(num_pages, context, num_rows)
    for tensor in (*space.keys, *space.values):
        tensor.normal_()
    pages = torch.randperm(num_pages).int()[None]
    positions = torch.arange(context - num_rows, context, dtype=torch.int32)
    rows = TokenRows(100 + torch.arange(num_rows), positions, torch.zeros(num_rows, dtype=torch.int32))
    with torch.inference_mode():
        hidden = model.forward(rows, pages, space)  # fills the buffers with what a forward leaves there
        whole: list[Callable[[], object]] = [
            lambda: model.forward(rows, pages, space),
            lambda: model.logits(hidden),
        ]
        parts = _parts(model, rows, pages, space)
        return Split(weights, num_rows, context, *best_ms([*parts, *whole], _REPEATS))


def measure(model_dir: Path, formats: Sequence[str], rows: Sequence[int], contexts: Sequence[int]) -> Iterator[Split]:
    """Every format, context and row count that fits it."""
    for weight_format in formats:
        settings = VerifierSettings.model_validate({"model": str(model_dir), "weight_format": weight_format})
        model = load_target(settings).model
        for context in contexts:
            for num_rows in (count for count in rows if count <= context):
                yield split(model, weight_format, num_rows, context)


def print_splits(splits: Sequence[Split], console: Console) -> None:
    """The table."""
    console.print(f"{cpu_name()}, {num_threads()} threads; milliseconds of all layers")
    table = Table(*Split._fields, "whole / linears")
    for each in splits:
        times = (f"{value:.2f}" for value in each[3:])
        table.add_row(each.weights, str(each.num_rows), str(each.context), *times, f"{each.ratio:.2f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="dspark bench kernels")
    parser.add_argument("--model", help="target: directory or hub id; default: the embedded one")
    parser.add_argument("--formats", default="q4,fp16")
    parser.add_argument("--contexts", default="128,512,2048")
    parser.add_argument("--rows", default="1,4,8,16,64")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    rows, contexts = ([int(part) for part in text.split(",")] for text in (options.rows, options.contexts))
    pair = choose_models(options.model, "none", load_settings(CommonSettings), load_settings(LauncherSettings))
    console = Console()
    splits: list[Split] = []
    with console.status("measuring") as status:
        for each in measure(pair.target, options.formats.split(","), rows, contexts):
            splits.append(each)
            status.update(f"{each.weights}, context {each.context}, {each.num_rows} rows")
    print_splits(splits, console)
    if options.out:
        found: list[dict[str, Any]] = [{**each._asdict(), "ratio": each.ratio} for each in splits]
        options.out.write_text(json.dumps({"device": cpu_name(), "threads": num_threads(), "splits": found}, indent=1))


if __name__ == "__main__":
    main()
