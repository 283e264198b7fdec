"""Rows, table and JSON of a benchmark."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.measure import GroupResult
from service_kit.cpu import available_cores, cpu_name

Row = dict[str, Any]

ALL = "all"
"""Class of rows over every prompt."""
_PACKAGES = ("dspark-server", "torch", "transformers", "numba", "numpy", "grpcio")


def make_rows(results: Sequence[GroupResult], baseline: str) -> list[Row]:
    """One row a (concurrency, class, mode), then one over all classes. `speedup` pairs each group with `baseline`'s."""
    rows = []
    for concurrency in sorted({result.concurrency for result in results}):
        at_concurrency = [result for result in results if result.concurrency == concurrency]
        classes = list(dict.fromkeys(result.prompt_class for result in at_concurrency))
        for name in [*classes, ALL] if len(classes) > 1 else classes:
            chosen = [result for result in at_concurrency if name in (ALL, result.prompt_class)]
            reference = [result for result in chosen if result.mode == baseline]
            for mode in dict.fromkeys(result.mode for result in chosen):
                own = [result for result in chosen if result.mode == mode]
                rows.append({"class": name, **_row(own, reference)})
    return rows


def _row(groups: list[GroupResult], reference: list[GroupResult]) -> Row:
    answers = [answer for group in groups for answer in group.answers]
    speeds = [group.tokens_per_second for group in groups]
    tpots = [answer.tpot_ms for answer in answers if answer.tpot_ms is not None]
    ratios = [own.tokens_per_second / base.tokens_per_second for own, base in zip(groups, reference, strict=False)]
    return {
        "mode": groups[0].mode,
        "concurrency": groups[0].concurrency,
        "num_requests": len(answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "tokens_per_second": _quantile(speeds, 50),
        "tokens_per_second_p25": _quantile(speeds, 25),
        "tokens_per_second_p75": _quantile(speeds, 75),
        "speedup": _quantile(ratios, 50),
        "ttft_ms_p50": _quantile([answer.ttft_ms for answer in answers], 50),
        "tpot_ms_p50": _quantile(tpots, 50),
        "tpot_ms_p95": _quantile(tpots, 95),
        **_step_columns({name: sum(group.counters[name] for group in groups) for name in groups[0].counters}),
    }


def _step_columns(counters: dict[str, int]) -> Row:
    """Per-step means from the scheduler's counters; the model forwards are what the executors timed themselves."""
    steps, rows = counters.get("num_steps", 0), counters.get("num_verify_rows", 0)
    if not steps:
        return {}
    outside = counters["step_ns"] - counters["drafter_model_ns"] - counters["verifier_model_ns"]
    return {
        "accepted_length": 1 + counters["num_accepted"] / rows if rows else None,
        "verify_length": counters["num_verified"] / rows if rows else None,
        "step_ms": counters["step_ns"] / steps / 1e6,
        "draft_ms": counters["draft_call_ns"] / steps / 1e6,
        "verify_ms": counters["step_call_ns"] / steps / 1e6,
        "drafter_model_ms": counters["drafter_model_ns"] / steps / 1e6,
        "verifier_model_ms": counters["verifier_model_ns"] / steps / 1e6,
        "accept_ms": counters["verifier_accept_ns"] / steps / 1e6,
        "outside_models_ms": outside / steps / 1e6,
        "outside_models_share": outside / counters["step_ns"],
    }


def _quantile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def fingerprint() -> dict[str, Any]:
    """What a measurement depends on besides its options."""
    return {
        "device": cpu_name(),
        "cores": available_cores(),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def write_json(path: Path, rows: list[Row], options: dict[str, Any], check: dict[str, Any]) -> None:
    """Writes `{"rows": …}` with options, versions and the outcome of the output check."""
    content = {"rows": rows, "options": options, "check": check, "environment": fingerprint()}
    path.write_text(json.dumps(content, indent=1) + "\n")


def print_table(console: Console, rows: Sequence[Row], baseline: str) -> None:
    """One line a row."""
    title = f"{cpu_name()}, {available_cores()} cores; n requests; medians (p25-p75); ratio: paired with {baseline}"
    table = Table(title=title)
    columns = ("c", "class", "mode", "n", "tokens/s", "ratio", "ttft ms", "tpot ms", "p95", "accepted", "verified")
    for column in (*columns, "step ms", "draft", "verify", "outside"):
        table.add_column(column, justify="left" if column in ("class", "mode") else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        speed, low, high = (row[f"tokens_per_second{suffix}"] for suffix in ("", "_p25", "_p75"))
        share = row.get("outside_models_share")
        table.add_row(
            str(row["concurrency"]),
            row["class"],
            row["mode"],
            str(row["num_requests"]),
            f"{speed:.1f} ({low:.1f}-{high:.1f})",
            _number(row["speedup"], 2),
            _number(row["ttft_ms_p50"], 0),
            _number(row["tpot_ms_p50"], 1),
            _number(row["tpot_ms_p95"], 1),
            *(_number(row.get(name), 2) for name in ("accepted_length", "verify_length")),
            *(_number(row.get(name), 1) for name in ("step_ms", "draft_ms", "verify_ms")),
            "" if share is None else f"{share:.0%}",
            end_section=row["class"] != following["class"],
        )
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
