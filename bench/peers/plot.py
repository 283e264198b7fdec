"""Draws the chart of a peers run: `PYTHON plot.py peers.json peers.png`, in the environment that has matplotlib."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def draw(content: dict[str, Any], path: Path) -> None:
    """One panel a concurrency: a bar of tokens/s for each engine, quartiles as whiskers, ours dark."""
    import_module("matplotlib").use("agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    rows, ours = content["rows"], content["options"]["modes"]
    sizes = sorted({row["concurrency"] for row in rows})
    names = list(content["engines"])
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(1 + 4 * len(sizes), 1 + 0.4 * len(names)), squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        speeds = {row["engine"]: row for row in rows if row["concurrency"] == size}
        for place, name in enumerate(names):
            if not (row := speeds.get(name)):
                continue
            speed = row["tokens_per_second"]
            whiskers = [[speed - row["tokens_per_second_p25"]], [row["tokens_per_second_p75"] - speed]]
            panel.barh(place, speed, xerr=whiskers, color="#1f4e79" if name in ours else "#a6bddb", height=0.7)
            panel.text(0, place, f" {speed:.0f}", va="center", color="white" if name in ours else "black")
        panel.set_yticks(range(len(names)), names if panel is panels[0][0] else [""] * len(names))
        panel.invert_yaxis()
        panel.set_title(f"{size} at once")
        panel.set_xlabel("tokens/s")
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{content['options']['model']}, {content['environment']['device']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
