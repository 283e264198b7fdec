"""Requests from recorded traces (`serve --trace FILE`): every block in the order in which it was drafted.

A round knows what would have been accepted only if its whole block was verified, so traces are recorded with verify
mode static. Each file is a class, named by its stem. A simulated request takes the rounds of a recorded one, from the
first on; where it needs more, because it was not drafted for a while or trimmed, they come round again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scheduler_service.policy import StepWork
from service_kit.errors import ConfigurationError
from simulator.population import Blocks, Floats, Ints, Population, RequestSizes, Stream


class TracedStep(NamedTuple):
    """A step without prefill."""

    work: StepWork
    """As it was run."""
    step_ns: float


class TracePopulation(Population):
    """What a few traces hold. Raises ConfigurationError naming the file, the line and what is wrong."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.class_names = [path.stem for path in paths]
        self.steps: list[TracedStep] = []
        confidences: list[list[float]] = []
        accepted: list[int] = []
        firsts, counts, class_ids, contexts, tokens = [], [], [], [], []
        for class_id, path in enumerate(paths):
            trace = _read(path)
            self.steps += trace.steps
            for rounds in trace.rounds.values():
                firsts.append(len(accepted))
                counts.append(len(rounds))
                class_ids.append(class_id)
                contexts.append(min(each.position for each in rounds))
                tokens.append(sum(each.num_committed for each in rounds))
                accepted += [each.num_accepted for each in rounds]
                confidences += [each.confidences for each in rounds]
        self.block_size = len(confidences[0])
        if odd := next((row for row in confidences if len(row) != self.block_size), None):
            raise ConfigurationError(
                f"traces with blocks of {self.block_size} and of {len(odd)} drafts: replay one drafter's at a time"
            )
        self.confidences, self.accepted = np.array(confidences, np.float32), np.array(accepted, np.intp)
        """[rounds, block] and [rounds], requests one behind the other."""
        self.firsts, self.counts = np.array(firsts, np.intp), np.array(counts, np.intp)
        """[requests] where each one's rounds are."""
        self.class_ids = np.array(class_ids, np.intp)
        self.prompt_lens, self.answer_lens = np.array(contexts, np.intp), np.array(tokens, np.intp)

    def stream(self, num_rows: int, seed: int) -> Stream:
        """See `Population`."""
        return _TraceStream(self, num_rows, seed)


class _TraceStream(Stream):
    """Recorded requests in an order that the seed shuffles, again and again."""

    def __init__(self, population: TracePopulation, num_rows: int, seed: int) -> None:
        self._population, self._dice = population, np.random.default_rng(seed)
        self._requests, self._rounds = np.zeros(num_rows, np.intp), np.zeros(num_rows, np.intp)
        self._queue: list[int] = []

    def start(self, rows: Ints) -> RequestSizes:
        while len(self._queue) < rows.size:
            self._queue += self._dice.permutation(self._population.firsts.size).tolist()
        requests = np.array(self._queue[: rows.size], np.intp)
        del self._queue[: rows.size]
        self._requests[rows], self._rounds[rows] = requests, 0
        of = self._population
        return RequestSizes(of.class_ids[requests], of.prompt_lens[requests], of.answer_lens[requests])

    def draft(self, rows: Ints) -> Blocks:
        of, requests = self._population, self._requests[rows]
        at = of.firsts[requests] + self._rounds[rows] % of.counts[requests]
        self._rounds[rows] += 1
        return Blocks(of.confidences[at], of.accepted[at])


def time_factors(steps: Sequence[TracedStep], step_ns: Sequence[float]) -> Floats:
    """[steps] recorded over predicted time, in order, their median 1: noise and drift of the machine."""
    ratios = np.array([each.step_ns / ns for each, ns in zip(steps, step_ns, strict=True)])
    factors: Floats = ratios / np.median(ratios)
    return factors


class _Round(NamedTuple):
    position: int
    confidences: list[float]
    num_accepted: int
    num_committed: int


class _Trace(NamedTuple):
    rounds: dict[int, list[_Round]]
    """By request."""
    steps: list[TracedStep]


def _read(path: Path) -> _Trace:
    trace = _Trace({}, [])
    line = 0
    block_len = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, 1):  # noqa: B007 - for the message
                record = json.loads(text)
                block_len = max(block_len, int(record["block_len"]))
                if record["num_prefill"] == 0 and record["rounds"]:
                    trace.steps.append(_step(record))
                for raw in record["rounds"]:
                    if raw["confidences"]:
                        trace.rounds.setdefault(int(raw["request"]), []).append(_round(raw))
    except OSError as error:
        raise ConfigurationError(f"trace {path}: {error}") from error
    except (ConfigurationError, KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"trace {path}, line {line}: {what}") from error
    for request, rounds in list(trace.rounds.items()):
        # Where an answer ends, its limit cuts blocks short.
        trace.rounds[request] = [each for each in rounds if len(each.confidences) == block_len]
        if not trace.rounds[request]:
            del trace.rounds[request]
    if not trace.rounds:
        raise ConfigurationError(f"trace {path}: no whole block in {line} lines: record with --verify-mode static")
    return trace


def _step(record: dict[str, Any]) -> TracedStep:
    names = ("num_rows", "num_drafted", "num_tokens", "num_context", "block_len")
    step_ns = float(record["step_ns"])
    if not 0 < step_ns < math.inf:
        raise ConfigurationError(f"step_ns is {step_ns}, not a time")
    return TracedStep(StepWork(*(record[name] for name in names)), step_ns)


def _round(raw: dict[str, Any]) -> _Round:
    confidences = [math.nan if each is None else float(each) for each in raw["confidences"]]
    num_accepted, verify_len = int(raw["num_accepted"]), int(raw["verify_len"])
    if verify_len != len(confidences):
        raise ConfigurationError(
            f"{verify_len} of {len(confidences)} drafts were verified, so what the others were worth is not known: "
            "record with --verify-mode static"
        )
    if not 0 <= num_accepted <= verify_len:
        raise ConfigurationError(f"num_accepted is {num_accepted} of {verify_len} verified drafts")
    return _Round(int(raw["position"]), confidences, num_accepted, int(raw["num_committed"]))
