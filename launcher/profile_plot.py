"""The plot of `dspark profile`: points against the fit, steps per second, and the published fit beside ours.

The published cost model (SGLang's profiler for this method) has three terms, T = bias + alpha(R) + theta(M): least
squares with one unknown for each R and each bin of 64 token rows, the first of both 0, linear between them and constant
beyond. Context and drafting have no term, and nothing keeps its curves from falling.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scheduler_service.calibrate_cost import Measurements
from scheduler_service.cost_model import CostModel, Floats
from scheduler_service.cost_model_fit import StepPoint

_BIN = 64


class PublishedFit(NamedTuple):
    """T = bias + alpha(R) + theta(M), in nanoseconds."""

    bias_ns: float
    row_probes: Floats
    row_ns: Floats
    token_probes: Floats
    token_ns: Floats

    def step_ns(self, num_rows: int, num_tokens: int) -> float:
        """Cost of a step."""
        return float(
            self.bias_ns
            + np.interp(num_rows, self.row_probes, self.row_ns)
            + np.interp(num_tokens, self.token_probes, self.token_ns)
        )


def fit_published(points: Sequence[StepPoint]) -> PublishedFit:
    """Least squares, as published."""
    rows = np.array([point.num_rows for point in points])
    tokens = np.array([point.num_tokens for point in points])
    bins = (tokens - 1) // _BIN
    row_probes, bin_ids = np.unique(rows), np.unique(bins)
    columns = np.column_stack(
        [np.ones(rows.size), rows[:, None] == row_probes[None, 1:], bins[:, None] == bin_ids[None, 1:]]
    )
    terms = np.linalg.lstsq(columns, np.array([point.ns for point in points]), rcond=None)[0]
    row_ns = np.concatenate(([0.0], terms[1 : row_probes.size]))
    token_ns = np.concatenate(([0.0], terms[row_probes.size :]))
    token_probes = np.array([tokens[bins == each].mean() for each in bin_ids])
    return PublishedFit(float(terms[0]), row_probes.astype(float), row_ns, token_probes, token_ns)


def plot_costs(model: CostModel, measured: Measurements, title: str, path: Path) -> None:
    """Writes a PNG of four panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((steps, drafts), (speed, errors)) = pyplot.subplots(2, 2, figsize=(13, 9))
    published = fit_published(measured.steps)
    _plot_steps(steps, model, measured.steps)
    _plot_drafts(drafts, model, measured)
    _plot_speed(speed, model, published, measured.steps)
    _plot_errors(errors, model, published, measured.steps)
    for axes in (steps, drafts, speed, errors):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _widest(points: Sequence[StepPoint]) -> list[StepPoint]:
    """Of each number of token rows and each context the point of fewest rows: whole windows."""
    best: dict[tuple[int, int], StepPoint] = {}
    for point in points:
        key = (point.num_tokens, _context_len(point))
        if key not in best or point.num_rows < best[key].num_rows:
            best[key] = point
    return [best[key] for key in sorted(best)]


def _context_len(point: StepPoint) -> int:
    """Positions before the rows, to the power of two below."""
    return 1 << (max(1, int(point.num_context / point.num_tokens)).bit_length() - 1)


def _plot_steps(axes: Any, model: CostModel, points: Sequence[StepPoint]) -> None:
    for index, length in enumerate(sorted({_context_len(point) for point in points})):
        own = [point for point in points if _context_len(point) == length]
        line = [point for point in _widest(points) if _context_len(point) == length]
        colour = f"C{index}"
        axes.scatter(
            [point.num_tokens for point in own], [point.ns / 1e6 for point in own], s=14, color=colour, alpha=0.7
        )
        axes.plot(
            [point.num_tokens for point in line],
            [model.plain_ns(point.num_rows, point.num_tokens, point.num_context) / 1e6 for point in line],
            color=colour,
            label=f"fit in whole windows, context {length} and more",
        )
    axes.set(
        xlabel="token rows M", ylabel="Step call, ms", title="Target's pass: measured points and fit", xscale="log"
    )


def _plot_drafts(axes: Any, model: CostModel, measured: Measurements) -> None:
    for index, (length, curve) in enumerate(sorted(model.block_draft_ns.items())):
        own = [point for point in measured.drafts if point.block_len == length]
        axes.scatter([point.num_drafted for point in own], [point.ns / 1e6 for point in own], s=14, color=f"C{index}")
        axes.plot(range(1, curve.size), curve[1:] / 1e6, color=f"C{index}", label=f"fit, blocks of {length}")
    axes.set(xlabel="drafted rows D", ylabel="Draft call, ms", title="Draft pass: measured points and fit")


def _plot_speed(axes: Any, model: CostModel, published: PublishedFit, points: Sequence[StepPoint]) -> None:
    context = min(_context_len(point) for point in points)
    line = [point for point in _widest(points) if _context_len(point) == context]
    tokens = [point.num_tokens for point in line]
    ours = [1e9 / model.plain_ns(point.num_rows, point.num_tokens, point.num_context) for point in line]
    theirs = [1e9 / published.step_ns(point.num_rows, point.num_tokens) for point in line]
    axes.plot(tokens, [1e9 / point.ns for point in line], "o", markersize=4, color="black", label="measured")
    axes.plot(tokens, ours, label="this fit")
    axes.plot(tokens, theirs, "--", label="published three-term fit")
    axes.set(
        xlabel="token rows M, in whole windows",
        ylabel="steps per second",
        title=f"SPS at context {context} and more",
        xscale="log",
    )


def _plot_errors(axes: Any, model: CostModel, published: PublishedFit, points: Sequence[StepPoint]) -> None:
    tokens = [point.num_tokens for point in points]
    fits = {
        "this fit": [
            model.plain_ns(point.num_rows, point.num_tokens, point.num_context) / point.ns for point in points
        ],
        "published three-term fit": [
            published.step_ns(point.num_rows, point.num_tokens) / point.ns for point in points
        ],
    }
    for name, ratios in fits.items():
        error = 100 * np.median(np.abs(np.array(ratios) - 1))
        axes.scatter(tokens, ratios, s=14, alpha=0.7, label=f"{name}: off by {error:.1f} % (median)")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="token rows M", ylabel="predicted / measured", title="Both fits on every point", xscale="log")
