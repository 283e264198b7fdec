"""Tables and the picture of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.part import Row


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, in the order in which keys first come."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(keys))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def plot(parts: Mapping[str, Sequence[Row]], title: str, path: Path) -> None:
    """Writes a PNG of what the parts measured: steps and kernels against their floors, fused against unfused,
    throughput against concurrency. A part without rows leaves its place empty."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(14, 10), layout="constrained")
    _lines(axes[0][0], parts.get("steps", ()), "of", "tier", "measured us", "floor us", "token rows of the step")
    _lines(axes[0][1], parts.get("throughput", ()), "mode", "requests", "tokens/s", "", "requests at once")
    largest = max((row["tier"] for row in parts.get("kernels", ())), default=0)
    kernels = [row for row in parts.get("kernels", ()) if row["tier"] == largest]
    _bars(axes[1][0], [row["kernel"] for row in kernels], kernels, f"time over floor, kernels of {largest} rows")
    fused = parts.get("fused", ())
    names = [f"{row['operation']}, {row['requests']}" for row in fused]
    _bars(axes[1][1], names, fused, "unfused over fused, by requests")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _lines(axis: Any, rows: Sequence[Row], name: str, x: str, y: str, floor: str, words: str) -> None:
    for index, series in enumerate(dict.fromkeys(row[name] for row in rows)):
        own = [row for row in rows if row[name] == series]
        places = [row[x] for row in own]
        axis.plot(places, [_number(row[y]) for row in own], "o-", color=f"C{index}", label=series)
        if floor:
            axis.plot(places, [_number(row[floor]) for row in own], ":", color=f"C{index}", label=f"{series}, floor")
    axis.set_xlabel(words)
    axis.set_ylabel(y)
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
    if rows:
        axis.legend(fontsize=8)


def _bars(axis: Any, names: Sequence[str], rows: Sequence[Row], words: str) -> None:
    axis.barh(range(len(rows)), [_number(row["ratio"]) for row in rows])
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(words)
