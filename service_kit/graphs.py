"""Steps captured once and replayed: the row counts they exist for, and what captures them.

A captured step reads and writes the same memory each time it runs and decides nothing on the host in between. So its
shape is fixed: a step runs in the smallest captured *geometry* (tokens × rows) that holds it, the rest being padding
that belongs to nobody. A shape without a graph is refused, never run otherwise.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from service_kit.errors import InvalidRequestError

_FIRST_TIERS = (1, 2, 4, 8)


class Geometry(NamedTuple):
    """Shape of a captured step."""

    tokens: int
    rows: int
    """Rows that emit, at most one for each token."""

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.rows} rows"


def tiers(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then two between one power of two and the next (16, 24, 32, 48, 64 ...), up to `largest` itself."""
    ladder = [tier for tier in _FIRST_TIERS if tier < largest]
    tier = 16
    while tier < largest:
        ladder += [each for each in (tier, tier + tier // 2) if each < largest]
        tier *= 2
    return (*ladder, largest)


def powers(largest: int) -> tuple[int, ...]:
    """1, 2, 4 ... and `largest` itself."""
    return (*(1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest), largest)


def geometries(max_tokens: int, max_rows: int) -> tuple[Geometry, ...]:
    """Every shape that a session's steps are captured in, ascending."""
    pairs = {Geometry(tokens, min(rows, tokens)) for tokens in tiers(max_tokens) for rows in powers(max_rows)}
    return tuple(sorted(pairs))


def widest(max_tokens: int, max_rows: int) -> tuple[Geometry, ...]:
    """One shape for each tier of tokens, with all the rows that it can have: few graphs, for steps that are rare."""
    return tuple(Geometry(tokens, min(max_rows, tokens)) for tokens in tiers(max_tokens))


class GraphRunner(Protocol):
    """What makes a step replayable."""

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Runs `work` over its memory and returns what runs it again. `work` must not read the device's values."""

    def synchronize(self) -> None:
        """Waits for everything that was started."""


class StepGraphs:
    """The captured geometries of one kind of step."""

    def __init__(self, name: str, runner: GraphRunner, known: Sequence[Geometry]) -> None:
        """Graphs of `name` will exist for the geometries in `known`."""
        self._name, self._runner = name, runner
        self._known = tuple(sorted(known))
        self._tokens = sorted({geometry.tokens for geometry in known})
        self._replays: dict[Geometry, Callable[[], None]] = {}

    @property
    def known(self) -> tuple[Geometry, ...]:
        """All geometries, ascending."""
        return self._known

    @property
    def is_captured(self) -> bool:
        """Whether all of them can be replayed."""
        return len(self._replays) == len(self._known)

    def fit(self, tokens: int, rows: int) -> Geometry:
        """The smallest geometry that holds so many. Raises InvalidRequestError naming the shape if none does."""
        place = bisect.bisect_left(self._tokens, tokens)
        if place < len(self._tokens):
            for geometry in self._known:
                if geometry.tokens == self._tokens[place] and geometry.rows >= rows:
                    return geometry
        raise InvalidRequestError(
            f"no {self._name} graph holds {Geometry(tokens, rows)}: the largest is {self._known[-1]}; lower "
            "max_batch_tokens or max_num_seqs and start a new session"
        )

    def capture(self, work_of: Callable[[Geometry], Callable[[], None]]) -> None:
        """Captures every geometry, the largest first, so that the smaller ones find memory that they can share."""
        self.drop()
        for geometry in reversed(self._known):
            self._replays[geometry] = self._runner.record(work_of(geometry))
        self._runner.synchronize()

    def replay(self, geometry: Geometry) -> None:
        """Starts a captured step. Raises InvalidRequestError naming a geometry that was not captured."""
        if geometry not in self._replays:
            captured = ", ".join(map(str, sorted(self._replays))) or "none"
            raise InvalidRequestError(f"no {self._name} graph of {geometry} was captured (captured: {captured})")
        self._replays[geometry]()

    def drop(self) -> None:
        """Forgets what was captured: the memory it reads is about to change."""
        self._replays.clear()


class CudaGraphRunner:
    """Whole steps as CUDA graphs, which share one memory pool: they never run at the same time."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Runs `work` once as it is, on a stream of its own (kernels compile, libraries take their memory), then
        captures it."""
        cuda = self._torch.cuda
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            work()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def synchronize(self) -> None:
        """Waits for the device."""
        self._torch.cuda.synchronize()
