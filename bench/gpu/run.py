"""Everything that only a GPU can show, in one run of less than eight minutes: one card, no network.

    python -m bench.gpu.run --out gpu.json [--models DIR] [--only kernels,steps] [--seconds 450]
    TRITON_INTERPRET=1 python -m bench.gpu.run --rehearse --out /tmp/gpu.json

Right results come first (parity, batch invariance), then times beside their floors. Each part has a budget and ends
when that is used up; one that the whole run has no time for any more is not started. A part that fails says so and the
others run; the exit status is then 1. It is 2 where there is no GPU. Weights are random but for those in DIR. The
rehearsal runs every part at tiny sizes in Triton's interpreter, to find the script's own mistakes: it prints no times.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu import parts_device, parts_serving, report
from bench.gpu.part import TIMED, Bench, Part, Row, SkippedError
from bench.gpu.scale import FULL, REHEARSAL
from kernels.aot_cases import MODELS
from service_kit.errors import ConfigurationError
from service_kit.gpu import choose_device, open_gpu

PARTS = (
    Part("parity", parts_device.parity, 60),
    Part("invariance", parts_device.invariance, 10),
    Part("kernels", parts_device.kernels, 60),
    Part("steps", parts_device.steps, 40),
    Part("fused", parts_device.fused, 30),
    Part("head share", parts_device.head_share, 20),
    Part("throughput", parts_serving.throughput, 140),
    Part("overlap", parts_serving.overlap, 40),
    Part("smollm2", parts_serving.smollm2, 50),
)
"""Budgets are in seconds and include what compiles when a part first needs it; together they are the whole run's."""
_SECONDS = 450.0


def measure(bench: Bench, parts: Sequence[Part], seconds: float, *, shows_times: bool) -> dict[str, dict[str, Any]]:
    """Results by part: rows, seconds, and in words why it failed ("error"), did not run or was cut short ("note")."""
    deadline = time.monotonic() + seconds
    results: dict[str, dict[str, Any]] = {}
    for part in parts:
        started = time.monotonic()
        rows: list[Row] = []
        result = results[part.name] = {"rows": rows, "note": "", "error": "", "seconds": 0.0}
        print(f"\n## {part.name}", flush=True)
        if started + part.budget_s > deadline:
            result["note"] = f"not started: {deadline - started:.0f} s are left, it may take {part.budget_s:.0f} s"
        else:
            try:
                for row in part.run(bench):
                    rows.append(row if shows_times else _without_times(row))
                    if time.monotonic() > started + part.budget_s:
                        result["note"] = f"cut short after its {part.budget_s:.0f} s"
                        break
            except SkippedError as error:
                result["note"] = f"skipped: {error}"
            except Exception:
                result["error"] = traceback.format_exc()
        result["seconds"] = time.monotonic() - started if shows_times else None
        print(
            "\n".join(filter(None, (report.table(rows) if rows else "", result["note"], result["error"]))), flush=True
        )
    return results


def _without_times(row: Row) -> Row:
    return {key: None if key.endswith(TIMED) and not key.startswith("floor") else value for key, value in row.items()}


def failures(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Parts that failed, or in which something came out wrong."""
    for name, result in results.items():
        if result["error"] or not all(row.get("ok", True) for row in result["rows"]):
            yield name


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; 1 if anything failed or came out wrong, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.run")
    parser.add_argument("--model", choices=sorted(MODELS), default="Qwen3-4B", help="shapes of kernels and steps")
    parser.add_argument("--models", type=Path, help=f"directory with {parts_serving.SMOLLM2} and its drafter")
    parser.add_argument("--only", default=",".join(part.name for part in PARTS), help="parts, with commas between")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="no part is started that may go beyond")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes without a GPU (set TRITON_INTERPRET=1)")
    parser.add_argument("--out", type=Path, help="JSON file to write, and beside it the picture (.png)")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - {part.name for part in PARTS}:
        parser.error(f"--only: no part is called {', '.join(sorted(unknown))}; there are {parser.get_default('only')}")
    try:
        bench = _open(options)
    except ConfigurationError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return 2
    print(f"{bench.gpu.words}; torch {torch.__version__}")
    try:
        with torch.inference_mode():
            chosen = [part for part in PARTS if part.name in names]
            if options.rehearse:
                chosen = [part._replace(budget_s=math.inf) for part in chosen]
            seconds = math.inf if options.rehearse else options.seconds
            results = measure(bench, chosen, seconds, shows_times=not options.rehearse)
    finally:
        bench.clear()
    failed = list(failures(results))
    if options.out:
        facts = {"device": bench.gpu.words, "torch": torch.__version__, "is_rehearsal": options.rehearse}
        options.out.write_text(json.dumps({**facts, "failed": failed, "parts": results}, indent=1) + "\n")
        rows = {name: result["rows"] for name, result in results.items()}
        title = "a rehearsal: nothing was measured" if options.rehearse else bench.gpu.words
        report.plot(rows, title, options.out.with_suffix(".png"))
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nnothing failed")
    return 1 if failed else 0


def _open(options: argparse.Namespace) -> Bench:
    """Raises ConfigurationError where there is no GPU that can serve."""
    if options.rehearse:
        from bench.gpu.no_gpu import interpreted_gpu

        return Bench(interpreted_gpu(), REHEARSAL, options.models)
    facts = choose_device("cuda", "device", lambda: 0)
    assert facts is not None  # only "auto" and "cpu" give none
    return Bench(open_gpu(facts), FULL._replace(model=MODELS[options.model]), options.models)


if __name__ == "__main__":
    sys.exit(main())
