"""What a part of the measurements gets and gives."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu.chain_models import Chain, write_pair
from bench.gpu.floors import Device, Work, device_of
from bench.gpu.random_models import RandomPair, make_pair
from bench.gpu.scale import Scale
from bench.gpu.serving import Executors
from service_kit.gpu import Gpu

Row = dict[str, Any]
"""A line of a part's table. A key that ends in one of TIMED is a measured time or what follows from one; "ok", where
there is one, says whether a comparison came out right."""
TIMED = (" us", " ms", "/s", "ratio", "share")


class SkippedError(Exception):
    """Why a part has nothing to measure, in words."""


@dataclass
class Bench:
    """A device and the sizes to measure."""

    gpu: Gpu
    scale: Scale
    models: Path | None
    """Directory of checkpoints by name."""

    @cached_property
    def pair(self) -> RandomPair:
        """Random weights on the device, made when first needed."""
        return make_pair(self.scale.model, self.gpu, self.scale.dtype)

    @cached_property
    def chain(self) -> tuple[Executors, Chain]:
        """Executors with a set acceptance rate, in place of `pair`."""
        self.clear()
        with tempfile.TemporaryDirectory() as directory:
            target, drafter, chain = write_pair(
                Path(directory), self.scale.chain, self.scale.acceptance, self.gpu.device
            )
            return Executors(target, drafter, **self.scale.executors), chain

    def clear(self) -> None:
        """Gives back what is on the device."""
        self.__dict__.pop("pair", None)
        if "chain" in self.__dict__:
            self.__dict__.pop("chain")[0].close()
        if self.gpu.device.type == "cuda":
            torch.cuda.empty_cache()

    def timed_us(self, work: Callable[[], object]) -> float:
        """Median of replays of `work`, captured, each waited for; in microseconds."""
        replay = self.gpu.runner.record(work)
        times = []
        for _ in range(self.scale.repeats):
            self.gpu.runner.synchronize()
            started = time.perf_counter_ns()
            replay()
            self.gpu.runner.synchronize()
            times.append((time.perf_counter_ns() - started) / 1e3)
        return statistics.median(times)

    def floor_us(self, *works: Work) -> float | None:
        """Time below which this device cannot do `works`, one after the other; None where its figures are unknown."""
        return None if self.device is None else sum(work.floor_us(self.device) for work in works)

    @property
    def device(self) -> Device | None:
        """Published figures of the device."""
        return device_of(self.gpu.words)


class Part(NamedTuple):
    """Something to measure."""

    name: str
    run: Callable[[Bench], Iterator[Row]]
    """Gives its lines as they are measured. Raises SkippedError."""
    budget_s: float
