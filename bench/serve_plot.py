"""The picture of a `dspark bench serve` run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serve_rows import Row

_SCHEDULED_COLUMNS = (("verify_length", "-", "verified"), ("drafted_length", "--", "drafted"))


def plot_rows(rows: Sequence[Row], class_name: str, title: str, path: Path) -> None:
    """Writes a PNG: throughput against concurrency, drafts of a row and step against concurrency, and throughput
    against the speed of each user; of the rows of one class."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own = [row for row in rows if row["class"] == class_name and row.get("tokens_per_second") is not None]
    figure, (speed, drafts, pareto) = plt.subplots(1, 3, figsize=(17, 5), layout="constrained")
    for index, mode in enumerate(dict.fromkeys(row["mode"] for row in own)):
        series = [row for row in own if row["mode"] == mode]
        colour = f"C{index % 10}"
        counts = [row["concurrency"] for row in series]
        medians = [row["tokens_per_second"] for row in series]
        low = [row["tokens_per_second_p25"] for row in series]
        high = [row["tokens_per_second_p75"] for row in series]
        speed.plot(counts, medians, "o-", color=colour, label=mode, markersize=4)
        speed.fill_between(counts, low, high, color=colour, alpha=0.1)
        pareto.plot([row["user_tokens_per_second"] for row in series], medians, "o-", color=colour, markersize=4)
        for name, style, word in _SCHEDULED_COLUMNS:
            if any(row.get(name) for row in series):
                values = [row.get(name, 0.0) for row in series]
                drafts.plot(counts, values, style, color=colour, label=f"{mode}, {word}")
    _axis(speed, "requests at once", "tokens/s, all requests (band: quartiles)")
    _axis(drafts, "requests at once", "drafts of a row and step")
    for axis in (speed, drafts):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        if axis.lines:
            axis.legend(fontsize=8)
    _axis(pareto, "tokens/s of each request after its first token (median)", "tokens/s, all requests")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _axis(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
