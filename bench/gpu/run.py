"""The first thing to run on a GPU: parity, kernel times against floors, whole steps by tier. One card, no network.

    python -m bench.gpu.run [--model Qwen3-4B] [--context 1024] [--out FILE]
    python -m bench.gpu.run --interpret          (no GPU: Triton's interpreter, tiny shapes, times that mean nothing)

Weights are random: times do not depend on them. A forward with Triton's kernels is first compared with one of the
reference operations. A part that fails says so and the others run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu.floors import DEVICES, TIERS, draft, step
from bench.gpu.random_models import RandomPair, make_pair
from kernels.aot_cases import MODELS, Model
from service_kit.errors import ConfigurationError
from service_kit.gpu import Gpu, choose_device, open_gpu

_TINY = Model(64, 128, 4, 2, 16, 512, 2, 1, 2, 8, 7)
_REPEATS = 20
_BUDGET_S = 420.0

Part = Callable[[RandomPair, Sequence[int], int], Iterator[dict[str, Any]]]


def timed_us(gpu: Gpu, work: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` replays of `work`, each waited for, in microseconds."""
    replay = gpu.runner.record(work)
    times = []
    for _ in range(repeats):
        gpu.runner.synchronize()
        started = time.perf_counter_ns()
        replay()
        gpu.runner.synchronize()
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def parity(pair: RandomPair, tiers: Sequence[int], context: int) -> Iterator[dict[str, Any]]:
    """Forwards with Triton's kernels against the reference operations on the same device."""
    for tier in tiers:
        rows = pair.windows(tier, context)
        own, reference = pair.logits(rows, "triton"), pair.logits(rows, "reference")
        difference = float((own - reference).abs().max() / reference.abs().max())
        yield {"tier": tier, "largest difference": difference, "ok": difference < pair.tolerance}


def invariance(pair: RandomPair, tiers: Sequence[int], context: int) -> Iterator[dict[str, Any]]:
    """Whether attention gives a row the same bits alone and in the largest tier."""
    rows = pair.windows(max(tiers), context)
    whole = pair.attention(rows)
    first = pair.attention(rows.first(8))
    yield {"tiers": f"8 in {max(tiers)}", "ok": torch.equal(whole[:8], first)}


def kernels(pair: RandomPair, tiers: Sequence[int], context: int) -> Iterator[dict[str, Any]]:
    """Kernels alone, all layers of a step, beside the time their bytes take."""
    for tier in tiers:
        floors = {work.kernel: work for work in (*step(pair.model, tier, context), *draft(pair.model, tier, context))}
        for name, work in pair.kernels(tier, context):
            measured = timed_us(pair.gpu, work, pair.repeats)
            floor = {device.name: floors[name].floor_us(device) for device in DEVICES}
            yield {"tier": tier, "kernel": name, "us": measured, "floor us": floor}


def steps(pair: RandomPair, tiers: Sequence[int], context: int) -> Iterator[dict[str, Any]]:
    """Whole verify steps and Draft calls from graphs, and the sequential head's share of both together."""
    for tier in tiers:
        verify = timed_us(pair.gpu, pair.verify_step(tier, context), pair.repeats)
        backbone = timed_us(pair.gpu, pair.backbone(tier, context), pair.repeats)
        head = timed_us(pair.gpu, pair.head(tier), pair.repeats)
        share = head / (verify + backbone + head)
        slots = max(1, tier // (pair.model.block_size + 1))
        yield {
            "tier": tier,
            "slots": slots,
            "verify us": verify,
            "backbone us": backbone,
            "head us": head,
            "share": share,
        }


PARTS: dict[str, Part] = {"parity": parity, "invariance": invariance, "kernels": kernels, "steps": steps}


def run(pair: RandomPair, tiers: Sequence[int], context: int, deadline: float) -> dict[str, Any]:
    """Results by part; a part's error is its result, and parts that the time does not suffice for say so."""
    results: dict[str, Any] = {}
    for name, part in PARTS.items():
        rows: list[dict[str, Any]] = []
        results[name] = {"rows": rows, "error": ""}
        try:
            for row in part(pair, tiers, context):
                rows.append(row)
                print(f"{name}: {json.dumps(row)}", flush=True)
                if time.monotonic() > deadline:
                    results[name]["error"] = "out of time"
                    break
        except Exception:
            results[name]["error"] = traceback.format_exc()
            print(f"{name}: {results[name]['error']}", flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if anything failed or differed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.run")
    parser.add_argument("--model", choices=sorted(MODELS), default="Qwen3-4B")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on the CPU (set TRITON_INTERPRET=1)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + _BUDGET_S
    tiers: Sequence[int]
    if options.interpret:
        from bench.gpu.no_gpu import interpreted_gpu

        pair, tiers, context = make_pair(_TINY, interpreted_gpu(), torch.float32, 1), (8, 16), 32
    else:
        try:
            facts = choose_device("cuda", "device", lambda: 0)
        except ConfigurationError as error:
            print(f"skipped: {error}", file=sys.stderr)
            return 2
        assert facts is not None
        pair = make_pair(MODELS[options.model], open_gpu(facts), torch.bfloat16, _REPEATS)
        tiers, context = TIERS, options.context
    print(pair.gpu.words)
    with torch.inference_mode():
        results = run(pair, tiers, context, deadline)
    if options.out:
        options.out.write_text(json.dumps({"device": pair.gpu.words, "context": context, **results}, indent=1) + "\n")
    is_good = all(not part["error"] and all(row.get("ok", True) for row in part["rows"]) for part in results.values())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
