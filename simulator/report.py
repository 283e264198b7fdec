"""Rows of a sweep as CSV, JSON, pictures and words."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.modes import BASELINES
from simulator.sweep import Row


def write_rows(rows: Sequence[Row], directory: Path, stem: str) -> list[Path]:
    """Both files; returns their paths. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    table, records = directory / f"{stem}.csv", directory / f"{stem}.json"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
    cleaned = [{key: None if value != value else value for key, value in row._asdict().items()} for row in rows]
    records.write_text(json.dumps(cleaned, indent=1))
    return [table, records]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """How each scheduled mode stands against the best baseline, in words."""
    lines = []
    for name in dict.fromkeys(row.mode for row in rows if row.mode not in BASELINES):
        own = [row for row in rows if row.mode == name and not math.isnan(row.gain_best)]
        if not own:
            continue
        worst, best = min(own, key=lambda row: row.gain_best), max(own, key=lambda row: row.gain_best)
        lines.append(
            f"{name}: {worst.gain_best:.3f} of the best baseline at its worst (concurrency {worst.concurrency}, "
            f"± {_shown(worst.gain_best_spread)} from seed to seed), {best.gain_best:.3f} at its best (concurrency "
            f"{best.concurrency})"
        )
    return lines


def _shown(spread: float) -> str:
    return "unknown" if math.isnan(spread) else f"{spread:.3f}"


def plot_rows(rows: Sequence[Row], title: str, path: Path) -> None:
    """Four panels as PNG: speeds against each other, budget, drafted length and gain against concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((speeds, gains), (budgets, drafted)) = pyplot.subplots(2, 2, figsize=(13, 9))
    for index, name in enumerate(dict.fromkeys(row.mode for row in rows)):
        own = [row for row in rows if row.mode == name]
        style: dict[str, Any] = {
            "color": f"C{index % 10}",
            "marker": "o" if name in BASELINES else "s",
            "markersize": 4,
            "linestyle": "--" if name in BASELINES else "-",
            "label": name,
        }
        at = [row.concurrency for row in own]
        speeds.plot([row.user_tokens_s for row in own], [row.tokens_s for row in own], **style)
        gains.errorbar(at, [row.gain_off for row in own], [row.gain_off_spread for row in own], **style)
        if name != "off":
            budgets.plot(at, [row.budget for row in own], **style)
            drafted.plot(at, [row.drafted_len for row in own], **style)
    speeds.set(
        xlabel="tokens a second of one user",
        ylabel="tokens a second of all",
        yscale="log",
        title="Throughput against per-user speed",
    )
    gains.set(xlabel="concurrency", xscale="log", ylabel="throughput over that of off", title="Gain, with its spread")
    budgets.set(
        xlabel="concurrency", xscale="log", ylabel="drafts verified of a row in a step", title="Mean verify budget"
    )
    drafted.set(
        xlabel="concurrency", xscale="log", ylabel="slots drafted of a row in a step", title="Mean drafted length"
    )
    for axes in (speeds, gains, budgets, drafted):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
