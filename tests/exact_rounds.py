"""Rounds of speculative decoding enumerated exactly: every draft, every acceptance, every recovered token.

A `World` is a target, a drafter and an engine in rational numbers. `output_distribution` runs the policy under test on
every path and returns the distribution of what is committed; a lossless engine's equals `target_distribution`. Rules of
the engine that are known to be wrong can be switched on, to see that the comparison notices.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.audit import audited_windows
from scheduler_service.policy import DraftedBatch, StepWork, VerifyPolicy, commit_cut

VOCAB_SIZE = 3
NAN = float("nan")

Text = tuple[int, ...]
Distribution = tuple[Fraction, ...]
Outputs = dict[tuple[Text, ...], Fraction]


@dataclass(frozen=True)
class FreeCosts:
    """Any costs at all: no shape is assumed, not even monotone."""

    token_ns: tuple[float, ...]
    context_ns: float = 0.0

    def total_ns(self, work: StepWork, contexts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See `StepCosts`."""
        theta = np.array(self.token_ns)[work.num_tokens : work.num_tokens + contexts.size + 1]
        return theta + self.context_ns * np.concatenate(([0.0], np.cumsum(contexts)))


class Call(NamedTuple):
    """What the policy is shown in one round, hashable."""

    rows: tuple[int, ...]
    confidences: tuple[tuple[float, ...], ...]
    limits: tuple[int, ...]
    contexts: tuple[int, ...]
    audits: tuple[bool, ...]
    """Rows verified whole, whatever their confidences."""


class State(NamedTuple):
    """What later rounds may depend on."""

    texts: tuple[Text, ...]
    calls: tuple[Call, ...] = ()
    drawn: tuple[dict[int, int], ...] = ()
    """Draft noise by row and position; kept only where it is reused."""

    def __hash__(self) -> int:
        return hash((self.texts, self.calls))


@dataclass(frozen=True)
class World:
    """The functions see no more than their arguments."""

    num_rows: int
    block_size: int
    target: Callable[[int, Text], Distribution]
    """By row and text."""
    draft: Callable[[int, Text, Text], Distribution]
    """By row, text and the drafts before."""
    confidence: Callable[[int, Text, Text], float]
    """Of the next draft, by row, text and the drafts before it."""
    make_policy: Callable[[], VerifyPolicy]
    limit: Callable[[int, State], int]
    """Most drafts of a row, by history: the guard, windows of requests; 0: the row is not drafted."""
    horizon: int
    """Tokens of each row that are compared."""
    row_weights: tuple[float, ...] = ()
    max_budget: int | None = None
    num_rounds: int = 2
    is_elastic: bool = False
    """Whether a round's blocks are only as long as its largest limit: the guard's choice of slots."""
    forbidden_cut: int | None = 1
    """Drafts verified from a row's first draft on that the target cannot emit: 1 is the rule, 0 is wrong, None: all."""
    is_audit: Callable[[int, int], bool] = lambda row, round_: False
    """Whether a row is audited, by row and rounds before."""
    odds: Callable[[int, State], float] = lambda row, state: 1.0
    """What the odds of a row's confidences are multiplied by, by history: recalibration."""
    audits_the_sure: bool = False
    """Wrong: a row is audited if its last confidence is high."""
    reuses_noise: bool = False
    """Wrong: a position drafted again gets the noise it had. The draft distribution must not depend on the drafts."""
    _windows: dict[tuple[Call, ...], list[tuple[int, int]]] = field(default_factory=dict)

    def windows(self, calls: tuple[Call, ...]) -> list[tuple[int, int]]:
        """Verify and commit lengths of the drafted rows of the last call, by a policy that saw all calls."""
        if calls not in self._windows:
            policy = self.make_policy()
            results = [audited_windows(policy, self._batch(call), call.audits) for call in calls]
            self._windows[calls] = list(zip(results[-1].verify_lens, results[-1].commit_lens, strict=True))
        return self._windows[calls]

    def _batch(self, call: Call) -> DraftedBatch:
        return DraftedBatch(
            confidences=np.array(call.confidences, np.float32),
            max_drafts=call.limits,
            num_emitting=self.num_rows,
            num_tokens=self.num_rows,
            row_keys=call.rows,
            contexts=call.contexts,
            row_weights=[self.row_weights[row] for row in call.rows] if self.row_weights else (),
            max_budget=self.max_budget,
        )

    def blocks(self, row: int, state: State, num_slots: int) -> list[tuple[Text, tuple[float, ...], Fraction]]:
        """Every block of `num_slots` drafts that may be drawn for a row: drafts, their confidences, probability."""
        text = state.texts[row]
        partial: list[tuple[Text, tuple[float, ...], Fraction]] = [((), (), Fraction(1))]
        for k in range(num_slots):
            noise = state.drawn[row].get(len(text) + k) if state.drawn else None
            partial = [
                ((*drafts, token), (*confidences, self.confidence(row, text, drafts)), probability * chance)
                for drafts, confidences, probability in partial
                for token, chance in enumerate(self.draft(row, text, drafts) if noise is None else _certain(noise))
                if chance
            ]
        return partial

    def outcomes(self, row: int, text: Text, drafts: Text, window: tuple[int, int]) -> Iterator[tuple[Text, Fraction]]:
        """What a row commits, with probabilities: rejection sampling of the drafts in its window."""
        verify_len, commit_len = window
        if self.forbidden_cut is not None:
            for k, token in enumerate(drafts[:verify_len]):
                if not self.target(row, text + drafts[:k])[token]:
                    verify_len = min(verify_len, k + self.forbidden_cut)
                    break
        for emitted, probability in _verified(self, row, text, drafts[:verify_len]):
            yield tuple(commit_cut(len(emitted) - 1, list(emitted), commit_len).token_ids), probability

    def completions(self, row: int, text: Text) -> list[tuple[Text, Fraction]]:
        """The text cut or continued by the target to the horizon."""
        if len(text) >= self.horizon:
            return [(text[: self.horizon], Fraction(1))]
        return [
            (whole, chance * probability)
            for token, chance in enumerate(self.target(row, text))
            if chance
            for whole, probability in self.completions(row, (*text, token))
        ]


def _certain(token: int) -> Distribution:
    return tuple(Fraction(int(other == token)) for other in range(VOCAB_SIZE))


def _verified(world: World, row: int, text: Text, drafts: Text) -> Iterator[tuple[Text, Fraction]]:
    reached = Fraction(1)
    for k, token in enumerate(drafts):
        target, draft = world.target(row, text + drafts[:k]), world.draft(row, text, drafts[:k])
        accept = min(Fraction(1), target[token] / draft[token])
        residual = [max(t - d, Fraction(0)) for t, d in zip(target, draft, strict=True)]
        if accept < 1:
            total = sum(residual)
            for other, mass in enumerate(residual):
                if mass:
                    yield (*drafts[:k], other), reached * (1 - accept) * mass / total
        reached *= accept
        if not reached:
            return
    for token, chance in enumerate(world.target(row, text + drafts)):
        if chance:
            yield (*drafts, token), reached * chance


def output_distribution(world: World) -> Outputs:
    """What is committed after the rounds, continued by the target to the horizon; joint over rows, zeros left out."""
    states: dict[State, Fraction] = {
        State(((),) * world.num_rows, (), ({},) * world.num_rows if world.reuses_noise else ()): Fraction(1)
    }
    outputs: Outputs = defaultdict(Fraction)
    for round_ in range(world.num_rounds):
        reached: dict[State, Fraction] = defaultdict(Fraction)
        for state, weight in states.items():
            needed = [max(0, world.horizon - len(text)) for text in state.texts]
            is_last = round_ == world.num_rounds - 1
            if not any(needed):
                outputs[tuple(text[: world.horizon] for text in state.texts)] += weight
                continue
            for following, probability in _round(world, state, needed if is_last else None):
                reached[following] += weight * probability
        states = reached
    for state, weight in states.items():
        for rows in product(*(world.completions(row, text) for row, text in enumerate(state.texts))):
            probability = weight
            for _, chance in rows:
                probability *= chance
            outputs[tuple(text for text, _ in rows)] += probability
    return dict(outputs)


def _round(world: World, state: State, needed: Sequence[int] | None) -> Iterator[tuple[State, Fraction]]:
    """The states that a round leads to. `needed`: in the last round, the tokens of each row still to be compared."""
    limits = [world.limit(row, state) for row in range(world.num_rows)]
    drafted = [row for row, limit in enumerate(limits) if limit]
    num_slots = max(limits) if world.is_elastic else world.block_size
    memo: dict[tuple[int, Text, tuple[int, int]], list[tuple[Text, Fraction]]] = {}

    def emissions(row: int, drafts: Text, window: tuple[int, int]) -> list[tuple[Text, Fraction]]:
        key = (row, drafts[: window[0]], window)
        if key not in memo:
            merged: dict[Text, Fraction] = defaultdict(Fraction)
            for emitted, probability in world.outcomes(row, state.texts[row], drafts, window):
                merged[emitted if needed is None else emitted[: needed[row]]] += probability
            memo[key] = list(merged.items())
        return memo[key]

    for blocks in product(*(world.blocks(row, state, num_slots) for row in drafted)):
        audits = [world.is_audit(row, len(state.calls)) for row in drafted]
        if world.audits_the_sure:
            audits = [confidences[-1] > 0.5 for _, confidences, _ in blocks]
        call = Call(
            tuple(drafted),
            tuple(_corrected(block[1], world.odds(row, state)) for row, block in zip(drafted, blocks, strict=True)),
            tuple(limits[row] for row in drafted),
            tuple(len(state.texts[row]) for row in drafted),
            tuple(audits),
        )
        calls = (*state.calls, call) if drafted else state.calls
        windows = dict(zip(drafted, world.windows(calls), strict=True)) if drafted else {}
        drafts = dict(zip(drafted, (drafts for drafts, _, _ in blocks), strict=True))
        chance = Fraction(1)
        for _, _, probability in blocks:
            chance *= probability
        drawn = state.drawn
        if drawn:
            drawn = tuple(
                {**drawn[row], **{len(state.texts[row]) + k: token for k, token in enumerate(drafts.get(row, ()))}}
                for row in range(world.num_rows)
            )
        rows = (emissions(row, drafts.get(row, ()), windows.get(row, (0, 0))) for row in range(world.num_rows))
        for emitted in product(*rows):
            probability = chance
            for _, each in emitted:
                probability *= each
            texts = tuple(text + tokens for text, (tokens, _) in zip(state.texts, emitted, strict=True))
            yield State(texts, calls if needed is None else (), drawn if needed is None else ()), probability


def _corrected(confidences: tuple[float, ...], odds: float) -> tuple[float, ...]:
    return confidences if odds == 1.0 else tuple(c * odds / (1.0 - c + c * odds) for c in confidences)


def target_distribution(world: World) -> Outputs:
    """The target's own distribution of the rows' first `horizon` tokens."""
    outputs: Outputs = {}
    for rows in product(*(world.completions(row, ()) for row in range(world.num_rows))):
        probability = Fraction(1)
        for _, chance in rows:
            probability *= chance
        outputs[tuple(text for text, _ in rows)] = probability
    return outputs


@dataclass(frozen=True)
class Tables:
    """Arbitrary functions of the prefix: a value for every argument, drawn when first asked for."""

    seed: int
    confidence_levels: tuple[float, ...]
    num_drafted_tokens: int = VOCAB_SIZE
    """Tokens that the drafter may propose at a position."""
    denominator: int = 4

    def __post_init__(self) -> None:
        for name in ("target", "draft", "confidence", "limit_draw", "odds"):
            object.__setattr__(self, name, cache(getattr(self, name)))

    def target(self, row: int, text: Text) -> Distribution:
        """Some tokens may have probability 0: a grammar's mask."""
        return self._distribution(random.Random(f"{self.seed} target {row} {text}"), VOCAB_SIZE)

    def draft(self, row: int, text: Text, drafts: Text) -> Distribution:
        """Depends on the whole prefix, as does the target."""
        return self._distribution(random.Random(f"{self.seed} draft {row} {text} {drafts}"), self.num_drafted_tokens)

    def confidence(self, row: int, text: Text, drafts: Text) -> float:
        """Any of the levels; it need not be the acceptance probability."""
        return random.Random(f"{self.seed} confidence {row} {text} {drafts}").choice(self.confidence_levels)

    def limit_draw(self, row: int, state: State) -> float:
        """A number in [0, 1) that depends on the row's history, and on nothing later."""
        history = (state.texts[row], [(call.rows, call.confidences) for call in state.calls])
        return random.Random(f"{self.seed} limit {row} {history}").random()

    def is_audit(self, row: int, round_: int) -> bool:
        """Every third, on average: by row and round alone."""
        return random.Random(f"{self.seed} audit {row} {round_}").random() < 0.33

    def odds(self, row: int, state: State) -> float:
        """Depends on the row's history, and on nothing later; 1 in the first round."""
        if not state.calls:
            return 1.0
        history = (state.texts[row], [(call.rows, call.confidences) for call in state.calls])
        return random.Random(f"{self.seed} odds {row} {history}").choice((0.2, 1.0, 3.0))

    def _distribution(self, draws: random.Random, max_support: int) -> Distribution:
        tokens = draws.sample(range(VOCAB_SIZE), min(max_support, draws.choice((1, 2, 3, 3))))
        weights = [0] * VOCAB_SIZE
        for token in tokens:
            weights[token] += 1
        for _ in range(self.denominator - len(tokens)):
            weights[draws.choice(tokens)] += 1
        return tuple(Fraction(weight, self.denominator) for weight in weights)
