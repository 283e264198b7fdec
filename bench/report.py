"""Tables, CSV and JSON of a benchmark."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.comparison import Verdict
from bench.serve_rows import Row
from service_kit.cpu import available_cores, cpu_name

_PACKAGES = ("dspark-server", "torch", "transformers", "numba", "numpy", "grpcio")
_LEFT = ("class", "mode", "lever", "best other")
Column = tuple[str, Callable[[Row], str]]


def fingerprint() -> dict[str, Any]:
    """What a measurement depends on besides its options."""
    return {
        "device": cpu_name(),
        "cores": available_cores(),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def write_json(
    path: Path, rows: list[Row], verdicts: Sequence[Verdict], options: dict[str, Any], check: dict[str, Any]
) -> None:
    """Writes `{"rows": …}` with comparisons, options, versions and the outcome of the output check."""
    comparisons = [
        {
            **verdict._asdict(),
            "to_best": verdict.to_best._asdict(),
            "to_best_of_each": verdict.to_best_of_each._asdict(),
            "is_within_noise": verdict.is_within_noise,
        }
        for verdict in verdicts
    ]
    content = {"rows": rows, "comparisons": comparisons, "options": options, "check": check}
    path.write_text(json.dumps({**content, "environment": fingerprint()}, indent=1) + "\n")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line a row; a cell is empty where a row has no such value."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, names, restval="")
        writer.writeheader()
        writer.writerows(rows)


def print_tables(console: Console, rows: Sequence[Row], verdicts: Sequence[Verdict], baseline: str) -> None:
    """Speed, then what rounds were like, then scheduled modes against the others."""
    machine = f"{cpu_name()}, {available_cores()} cores"
    console.print(
        _table(
            f"{machine}; n requests; medians (p25-p75); ratios: paired with {baseline}; user: of a request after its "
            "first token; decode: ratio of steps without prefill; at equal speed: throughput over the baseline's at "
            "the same user speed, and the reverse",
            [
                *_NAMES,
                ("n", lambda row: str(row["num_requests"])),
                ("tokens/s", _spread("tokens_per_second", 1)),
                ("ratio", _spread("speedup", 2)),
                ("user t/s", _number("user_tokens_per_second", 1)),
                ("ratio ", _number("user_speedup", 2)),
                ("decode", _number("decode_speedup", 2)),
                ("ttft ms", _number("ttft_ms_p50", 0)),
                ("tpot ms", _number("tpot_ms_p50", 1)),
                ("p95", _number("tpot_ms_p95", 1)),
                ("at equal speed", _number("throughput_gain_at_user_speed", 2)),
                ("at equal throughput", _number("user_gain_at_throughput", 2)),
            ],
            rows,
        )
    )
    console.print(
        _table(
            "accepted: tokens a row commits a step; verified, drafted: drafts a row and step (of drafted ones alone); "
            "use: accepted length over whole blocks'; rows: decoding; times: ms a step; predicted, ledger: speed-ups",
            [
                *_NAMES,
                ("accepted", _number("accepted_length", 2)),
                ("verified", _with_drafted("verify_length")),
                ("drafted", _with_drafted("drafted_length")),
                ("rate", _number("acceptance_rate", 2)),
                ("use", _number("utilisation", 2)),
                ("rows", _number("rows", 1)),
                ("step", _number("step_ms", 1)),
                ("draft", _number("draft_ms", 1)),
                ("verify", _number("verify_ms", 1)),
                ("L ms", _number("token_ms", 1)),
                ("predicted", _number("predicted_speedup", 3)),
                ("ledger", _number("ledger_speedup", 3)),
                ("lever", lambda row: str(row.get("lever", ""))),
            ],
            [row for row in rows if "accepted_length" in row],
        )
    )
    for verdict in verdicts:
        console.print(describe(verdict), highlight=False)


def describe(verdict: Verdict) -> str:
    """One line on a comparison; in parentheses, 95 % intervals of the medians."""
    noise = "" if verdict.noise is None else f"; equal ones differ by up to {verdict.noise:.1%}"
    ending = {True: ": not slower than noise", False: ": SLOWER", None: ""}[verdict.is_within_noise]
    return (
        f"c={verdict.concurrency} {verdict.mode}: {verdict.to_best} of the best other, {verdict.best}; "
        f"{verdict.to_best_of_each} of the best in each of {verdict.to_best.num_groups} groups{noise}{ending}"
    )


def _table(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Table:
    table = Table(title=title)
    for name, _ in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], *rows[-1:]], strict=True):
        table.add_row(*(cell(row) for _, cell in columns), end_section=row["class"] != following["class"])
    return table


def _number(name: str, digits: int) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(name)
        return value if isinstance(value, str) else "" if value is None else f"{value:.{digits}f}"

    return cell


def _spread(name: str, digits: int) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row.get(name) is None:
            return ""
        return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(*(row[name + end] for end in ("", "_p25", "_p75")), d=digits)

    return cell


def _with_drafted(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        drafted = row.get(f"{name}_drafted")
        return f"{row[name]:.2f}" + ("" if drafted is None else f" ({drafted:.2f})")

    return cell


_NAMES: list[Column] = [
    ("c", lambda row: str(row["concurrency"])),
    ("class", lambda row: str(row["class"])),
    ("mode", lambda row: str(row["mode"])),
]
