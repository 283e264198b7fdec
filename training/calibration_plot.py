"""The plot of `dspark calibrate`: reliability before and after, and what a threshold on confidences would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training.calibration_error import Bins, SweepPoint, mean_error


class RegimePlot(NamedTuple):
    """One regime, on held-out rounds."""

    before: Sequence[Bins]
    after: Sequence[Bins]
    """By position."""
    sweep: Sequence[SweepPoint]


def plot_calibration(regimes: Mapping[str, RegimePlot], title: str, path: Path) -> None:
    """Writes a PNG: a row for each regime; survival predicted against observed before and after, and the sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(regimes), 3, figsize=(13, 3.6 * len(regimes)), squeeze=False)
    for (name, regime), (before, after, sweep) in zip(regimes.items(), rows, strict=True):
        _plot_reliability(before, regime.before, f"{name}, the head's own")
        _plot_reliability(after, regime.after, f"{name}, calibrated")
        _plot_sweep(sweep, regime.sweep, name)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=65)
    pyplot.close(figure)


def _plot_reliability(axes: Any, positions: Sequence[Bins], title: str) -> None:
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    for position, bins in enumerate(positions, 1):
        shown = bins.counts >= 50  # fewer rounds say nothing
        axes.plot(
            bins.predicted[shown],
            bins.observed[shown],
            "o-",
            markersize=3,
            linewidth=1,
            label=f"{position}: {100 * bins.error:.1f} %",
        )
    axes.set(
        xlabel="predicted survival",
        ylabel="observed",
        title=f"{title}: ECE {100 * mean_error(positions):.1f} % on average",
    )
    axes.title.set_fontsize(9)
    axes.legend(fontsize=6, title="position: ECE", title_fontsize=6)
    axes.grid(alpha=0.3)


def _plot_sweep(axes: Any, points: Sequence[SweepPoint], name: str) -> None:
    thresholds = [point.threshold for point in points]
    axes.plot(thresholds, [point.acceptance_rate for point in points], "o-", markersize=3, label="acceptance rate")
    axes.plot(thresholds, [point.tokens_per_step for point in points], "s-", markersize=3, label="tokens a step")
    axes.set(xlabel="threshold on calibrated confidences", title=f"{name}, windows by threshold")
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
