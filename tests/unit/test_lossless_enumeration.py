"""Lossless by enumeration: what the policies commit is distributed exactly as the target, in rational arithmetic.

Every path of two or three rounds is followed (a trimmed position is drawn again in the next), with arbitrary targets,
drafters, confidences and costs, a guard that decides by history whether and how far a row is drafted, audited rows,
confidences corrected by history, and tokens that a grammar forbids. Rules known to be wrong must fail the same
comparison. (In blocks of one draft no confidence has seen a draft of its own round, so nearly every rule is lossless
there.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from exact_rounds import (
    NAN,
    Distribution,
    FreeCosts,
    State,
    Tables,
    Text,
    World,
    output_distribution,
    target_distribution,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_service.policy import DraftedBatch, StepCosts, VerifyPolicy, Windows
from scheduler_service.policy.adaptive import AdaptivePolicy
from scheduler_service.policy.cap_accept import CapAcceptPolicy
from scheduler_service.policy.causal import CausalPolicy
from scheduler_service.policy.lagged import LaggedPolicy, OlderConfidences
from scheduler_service.policy.static import StaticPolicy
from scheduler_service.policy.survival import admission_order, lens_of, throughput
from scheduler_service.policy.threshold import ThresholdPolicy

MakePolicy = Callable[[StepCosts], VerifyPolicy]

LEGAL: dict[str, MakePolicy] = {
    "causal": CausalPolicy,
    "lagged": LaggedPolicy,
    "lagged by 2": lambda costs: LaggedPolicy(costs, budget_lag=2),
    "adaptive": AdaptivePolicy,
    "adaptive by 2": lambda costs: AdaptivePolicy(costs, budget_lag=2),
    "cap-accept causal": lambda costs: CapAcceptPolicy(CausalPolicy(costs)),
    "cap-accept lagged": lambda costs: CapAcceptPolicy(LaggedPolicy(costs)),
    "static": lambda costs: StaticPolicy(),
    "fixed": lambda costs: StaticPolicy(1),
    "threshold": lambda costs: ThresholdPolicy(0.5),
}


class GlobalSearch(VerifyPolicy):
    """Wrong: the best of all windows by current confidences (paper, Appendix A)."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        rows, gains = admission_order(survival)
        theta = throughput(gains, batch.plain_gain, self._costs.total_ns(batch.work, batch.contexts_of(rows)))
        return lens_of(rows[: int(np.argmax(theta))], survival.shape[0])


class WholeOrTrimmed(GlobalSearch):
    """Wrong: the causal windows, unless whole blocks look better by current confidences."""

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        rows, gains = admission_order(survival)
        theta = throughput(gains, batch.plain_gain, self._costs.total_ns(batch.work, batch.contexts_of(rows)))
        trimmed = CausalPolicy(self._costs).choose(batch, usable, survival)
        return usable if theta[-1] > theta[int(trimmed.sum())] else trimmed


class NoLag(LaggedPolicy):
    """Wrong: the budget from the drafts it is spent on."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(costs)
        self._older = _NotOlder(1)


class AdaptiveOnCurrent(AdaptivePolicy):
    """Wrong: the rule chosen by the drafts it decides about."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__(costs)
        self._older = _NotOlder(1)


class _NotOlder(OlderConfidences):
    def of(self, batch: DraftedBatch) -> npt.NDArray[np.float32]:
        return batch.confidences


class ConfidenceBehind(CausalPolicy):
    """Wrong: ranks a draft by the confidence that has seen it."""

    def windows(self, batch: DraftedBatch) -> Windows:
        return super().windows(replace(batch, confidences=np.roll(batch.confidences, -1, axis=1)))


class WholeRowOnInvalid(CausalPolicy):
    """Wrong: a bad confidence takes the whole row's window."""

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        is_bad = usable < np.minimum(batch.max_drafts, survival.shape[1])
        return super().choose(batch, usable, np.where(is_bad[:, None], 0.0, survival))


# DSpark, Appendix A: one request, two drafts, 1.0, 0.5, 0.45 steps per second at 1, 2, 3 token rows.
_FIRST_TARGET = (Fraction(7, 10), Fraction(3, 10), Fraction(0))
_FIRST_DRAFT = (Fraction(1, 2), Fraction(1, 2), Fraction(0))


def _appendix_a(make_policy: MakePolicy, num_rounds: int, horizon: int) -> World:
    costs = FreeCosts((0.0, 1 / 1.0, 1 / 0.5, 1 / 0.45))

    def confidence(row: int, text: Text, drafts: Text) -> float:
        return 0.8 if not drafts else (0.9, 0.0, 0.0)[drafts[0]]

    return World(
        num_rows=1,
        block_size=2,
        target=lambda row, text: _FIRST_TARGET,
        draft=lambda row, text, drafts: _FIRST_DRAFT,
        confidence=confidence,
        make_policy=lambda: make_policy(costs),
        limit=lambda row, state: 2,
        horizon=horizon,
        num_rounds=num_rounds,
    )


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_appendix_a(num_rounds: int) -> None:
    for rule in (CausalPolicy, LaggedPolicy, AdaptivePolicy):
        outputs = output_distribution(_appendix_a(rule, num_rounds, horizon=1))
        assert outputs == {((0,),): Fraction(7, 10), ((1,),): Fraction(3, 10)}
        world = _appendix_a(rule, num_rounds, horizon=3)
        assert output_distribution(world) == target_distribution(world)
    outputs = output_distribution(_appendix_a(GlobalSearch, num_rounds, horizon=1))
    assert outputs == {((0,),): Fraction(17, 20), ((1,),): Fraction(3, 20)}


def _world(
    seed: int,
    make_policy: MakePolicy,
    num_rows: int,
    block_size: int,
    horizon: int,
    levels: tuple[float, ...],
    token_ns: tuple[float, ...],
    **options: Any,
) -> World:
    # Blocks of three drafts in two rows are drawn from two tokens a position: 64 pairs of blocks instead of 729.
    tables = Tables(seed, levels, num_drafted_tokens=2 if num_rows * block_size > 4 else 3)
    costs = FreeCosts((0.0, *token_ns), options.pop("context_ns", 0.0))

    def limit(row: int, state: State) -> int:
        """Half of the time the whole block, else anything from not drafting at all."""
        return min(block_size, int(tables.limit_draw(row, state) * 2 * (block_size + 1)))

    return World(
        num_rows=num_rows,
        block_size=block_size,
        target=tables.target,
        draft=tables.draft,
        confidence=tables.confidence,
        make_policy=lambda: make_policy(costs),
        limit=limit,
        horizon=horizon,
        is_audit=tables.is_audit if options.pop("has_audits", False) else lambda row, round_: False,
        odds=tables.odds if options.pop("recalibrates", False) else lambda row, state: 1.0,
        **options,
    )


@st.composite
def worlds(
    draw: st.DrawFn, rules: tuple[str, ...], num_rows: tuple[int, ...], block_sizes: tuple[int, ...], horizon: int
) -> World:
    """An engine with a legal policy over arbitrary tables."""
    rows, block_size = draw(st.sampled_from(num_rows)), draw(st.sampled_from(block_sizes))
    unit = st.one_of(st.sampled_from((0.1, 0.97)), st.floats(0, 1, width=32), st.sampled_from((0.0, 1.0, NAN, 1.5)))
    max_tokens = rows * (block_size + 1)
    steps = st.lists(st.floats(0, 0.4), min_size=max_tokens, max_size=max_tokens)
    # Half of them where all and nothing compete: then a wrong rule shows.
    any_costs = st.lists(st.floats(0.1, 10), min_size=max_tokens, max_size=max_tokens)
    jump_costs = st.builds(
        lambda jump, steps: [1.0 * rows] * rows + [jump * rows + sum(steps[:k]) for k in range(max_tokens - rows)],
        st.floats(1, 3),
        steps,
    )
    return _world(
        draw(st.integers(0, 2**32 - 1)),
        LEGAL[draw(st.sampled_from(rules))],
        rows,
        block_size,
        horizon,
        tuple(draw(st.lists(unit, min_size=2, max_size=4))),
        tuple(draw(st.one_of(any_costs, jump_costs))),
        context_ns=draw(st.sampled_from((0.0, 0.3))),
        row_weights=draw(st.sampled_from(((), (1.0, 2.5)[:rows]))),
        max_budget=draw(st.one_of(st.none(), st.integers(0, max_tokens))),
        is_elastic=draw(st.booleans()),
        has_audits=draw(st.booleans()),
        recalibrates=draw(st.booleans()),
        num_rounds=draw(st.sampled_from((2, 3))) if rows == 1 else 2,
    )


RULES = ("causal", "lagged", "any")
"""The two legal rules alone, and all policies mixed: they are built on the rules or look at no draft at all."""


def _prove(rule: str, num_cases: int, **sizes: Any) -> None:
    @settings(max_examples=num_cases, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(worlds(rules=tuple(sorted(LEGAL)) if rule == "any" else (rule,), **sizes))
    def proof(world: World) -> None:
        assert output_distribution(world) == target_distribution(world)

    proof()


@pytest.mark.parametrize("rule", RULES)
def test_one_row(rule: str) -> None:
    _prove(rule, 150, num_rows=(1,), block_sizes=(1, 2, 3), horizon=3)


@pytest.mark.parametrize("rule", RULES)
def test_two_rows_of_one_draft(rule: str) -> None:
    _prove(rule, 75, num_rows=(2,), block_sizes=(1,), horizon=3)


@pytest.mark.parametrize("rule", RULES)
def test_two_rows(rule: str) -> None:
    _prove(rule, 15, num_rows=(2,), block_sizes=(2, 3), horizon=2)


_JUMP_NS = (1.0, 2.9, 3.05, 3.2)
"""A first draft is dear, the next ones are nearly free: three good drafts are worth it, two are not."""


_SLOPE_NS = (1.0, 1.5, 1.9, 2.3)
"""A draft is worth its cost if it is likely."""


def _jumping_world(seed: int, make_policy: MakePolicy, token_ns: tuple[float, ...] = _JUMP_NS, **options: Any) -> World:
    """One row of three drafts; with the jump, the last confidence decides between all and none, if a rule lets it."""
    return _world(seed, make_policy, 1, 3, 3, (0.1, 0.97, 0.97), token_ns, **options)


def _num_caught(worlds_of_seed: Callable[[int], World]) -> int:
    cases = [worlds_of_seed(seed) for seed in range(12)]
    return sum(output_distribution(world) != target_distribution(world) for world in cases)


@pytest.mark.parametrize(
    ("mutant", "token_ns"),
    [
        (GlobalSearch, _JUMP_NS),
        (WholeOrTrimmed, _JUMP_NS),
        (NoLag, _JUMP_NS),
        (AdaptiveOnCurrent, _JUMP_NS),
        (ConfidenceBehind, _SLOPE_NS),
    ],
)
def test_a_rule_that_looks_behind_a_draft_is_caught(mutant: MakePolicy, token_ns: tuple[float, ...]) -> None:
    assert _num_caught(lambda seed: _jumping_world(seed, mutant, token_ns)) > 0


def test_audits_chosen_by_confidence_are_caught() -> None:
    def world(seed: int, **options: Any) -> World:
        return _jumping_world(seed, CausalPolicy, **options)

    assert _num_caught(lambda seed: world(seed, audits_the_sure=True)) > 0
    assert _num_caught(lambda seed: world(seed, has_audits=True, recalibrates=True)) == 0


def test_dropping_a_whole_row_for_a_bad_confidence_is_caught() -> None:
    def world(seed: int, rule: MakePolicy) -> World:
        return _world(seed, rule, 1, 3, 3, (NAN, 0.9, 0.95), (1.0, 1.1, 1.2, 1.3))

    assert _num_caught(lambda seed: world(seed, WholeRowOnInvalid)) > 0
    assert _num_caught(lambda seed: world(seed, CausalPolicy)) == 0


def test_cutting_before_a_forbidden_draft_is_caught() -> None:
    assert _num_caught(lambda seed: _jumping_world(seed, whole_blocks, forbidden_cut=0)) > 0
    assert _num_caught(lambda seed: _jumping_world(seed, whole_blocks, forbidden_cut=1)) == 0
    assert _num_caught(lambda seed: _jumping_world(seed, whole_blocks, forbidden_cut=None)) == 0


def whole_blocks(costs: StepCosts) -> VerifyPolicy:
    return StaticPolicy()


def _redrawn_world(seed: int, *, reuses_noise: bool) -> World:
    """Draft distributions that depend on the position alone, so that the same noise gives the same draft. The first
    round verifies one draft of three; in the second, the third confidence of the first decides between all and none."""
    tables = Tables(seed, ())

    def draft(row: int, text: Text, drafts: Text) -> Distribution:
        return tables.draft(row, (len(text) + len(drafts),), ())

    world = _jumping_world(seed, LaggedPolicy, reuses_noise=reuses_noise)
    return replace(world, draft=draft, limit=lambda row, state: 3 if state.calls else 1)


def test_reusing_the_noise_of_a_position_is_caught() -> None:
    """An older confidence then knows the draft that is drawn again (design 5.5)."""
    assert _num_caught(lambda seed: _redrawn_world(seed, reuses_noise=True)) > 0
    assert _num_caught(lambda seed: _redrawn_world(seed, reuses_noise=False)) == 0
