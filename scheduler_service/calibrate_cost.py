"""Measures what steps cost, with real calls: `Step` of M token rows in R rows behind a context, `Draft` of D blocks.

Every repeat goes through all shapes in another order, so that a drift of the machine becomes noise, not a slope.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

import numpy as np

from scheduler_service.batch import Batch
from scheduler_service.calibrate_probe import NUM_INGESTED, Probe
from scheduler_service.cost_model import shown_sizes
from scheduler_service.cost_model_fit import DraftPoint, StepPoint
from scheduler_service.executors import DrafterClient, VerifierClient

log = logging.getLogger(__name__)

_LARGE = 16
"""Sizes up to it are measured in any case, larger ones as far as the time goes; beyond, costs are extrapolated."""


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure."""

    num_repeats: int
    budget_s: float
    """After this long no shape is measured that can be done without."""
    every_large: int
    """Of the numbers of token rows beyond `_LARGE`, every how many-th is tried."""
    context_lens: tuple[int, ...]
    """Ascending; capped by what fits."""
    num_row_counts: int
    """Row counts R tried for a number of token rows M, between whole windows and a row for each token; at least 2."""


QUICK = Effort(3, 6.0, 2, (64, 256), 2)
THOROUGH = Effort(9, 120.0, 1, (64, 256, 1024), 4)


class Measurements(NamedTuple):
    """Medians by shape; of two middle ones the lower, since noise only adds time."""

    steps: list[StepPoint]
    drafts: list[DraftPoint]
    spread: float
    """Median distance of a single measurement from its shape's median, relative to that."""


class _Shape(NamedTuple):
    """What to time: a `Step`, and behind it, if `is_drafted`, a `Draft` of the same rows with each block length."""

    context_len: int
    num_rows: int
    num_tokens: int
    is_drafted: bool


def measure_costs(
    batch: Batch,
    verifier: VerifierClient,
    drafter: DrafterClient,
    step_ids: Iterator[int],
    block_lens: Sequence[int],
    effort: Effort = QUICK,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Measurements:
    """Times of calls. The batch must be idle. `on_progress` gets the share done, 0 to 1.

    Raises ConfigurationError if not even a page of context and a block fit.
    """
    probe = Probe(batch, verifier, drafter, step_ids, effort.context_lens)
    step_ns: dict[tuple[int, int, float], list[float]] = defaultdict(list)
    draft_ns: dict[tuple[int, int], list[float]] = defaultdict(list)
    started = time.monotonic()
    try:
        probe.prepare()
        shapes = _shapes(probe, effort)
        small, large = (
            [each for each in shapes if (each.num_tokens > _LARGE) is is_large] for is_large in (False, True)
        )
        num_done, num_all = 0, effort.num_repeats * len(shapes)
        for number, wanted in enumerate([small, large, *[shapes] * (effort.num_repeats - 1)]):
            for index in np.random.default_rng(number).permutation(len(wanted)):
                elapsed = time.monotonic() - started
                if number and elapsed > effort.budget_s:
                    break
                shape = wanted[index]
                num_done += 1
                on_progress(max(num_done / num_all, min(1.0, elapsed / effort.budget_s)))
                probe.use_context(shape.context_len)
                step_ns[probe.key_of(shape.num_rows, shape.num_tokens, shape.context_len)].append(
                    probe.timed_step(shape.num_rows, shape.num_tokens)
                )
                for block_len in block_lens if shape.is_drafted else ():
                    key = (shape.num_rows, block_len)
                    draft_ns[key].append(probe.timed_draft(shape.num_rows, shape.num_tokens, block_len))
    finally:
        probe.release()
    on_progress(1.0)
    log.info("step costs measured up to %d token rows in %.1f s", max(step_ns)[1], time.monotonic() - started)
    distances = [
        abs(ns / median(times) - 1)
        for times in (*step_ns.values(), *draft_ns.values())
        for ns in times
        if len(times) > 2
    ]
    return Measurements(
        [StepPoint(*key, median_low(times)) for key, times in sorted(step_ns.items())],
        [DraftPoint(*key, median_low(times)) for key, times in sorted(draft_ns.items())],
        median(distances) if distances else 0.0,
    )


def _shapes(probe: Probe, effort: Effort) -> list[_Shape]:
    shapes = []
    sizes = shown_sizes(probe.max_tokens)
    large = [size for size in sizes if size > _LARGE]
    sizes = sizes[: len(sizes) - len(large)] + large[effort.every_large - 1 :: effort.every_large]
    for context_len in probe.context_lens:
        for num_tokens in sizes:
            fewest, most = -(-num_tokens // probe.row_len), min(num_tokens, probe.num_slots)
            counts = {round(count) for count in np.geomspace(fewest, most, effort.num_row_counts)}
            shapes += [_Shape(context_len, num_rows, num_tokens, False) for num_rows in sorted(counts)]
    # δ has no term for context: it is measured at a usual one.
    usual = probe.context_lens[len(probe.context_lens) // 2]
    for num_rows in shown_sizes(probe.num_slots):
        num_tokens = min(num_rows * NUM_INGESTED, probe.max_tokens)
        shapes.append(_Shape(usual, num_rows, num_tokens, True))
    return shapes
