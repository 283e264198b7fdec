"""`dspark bench peers`: our server and other engines on the same model, prompts and cores, in one interleaved run.

Every group of prompts goes to every engine in turn, another one first each time, so that drift of the machine hits all
alike. Peers are stopped (SIGSTOP) while another engine is measured. No prompt is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.measure import GroupResult
from bench.peers.contestants import Contestant
from bench.peers.worker import PeerError, PeerPrompt

WARM_TOKENS = 4
LONG_TOKENS = 2
"""Answer tokens after a long prompt: only the first is timed."""


@dataclass(frozen=True)
class Plan:
    """What is run, in order."""

    warm_up: Sequence[PeerPrompt]
    """As many as the highest concurrency."""
    groups: Mapping[int, Sequence[Sequence[PeerPrompt]]]
    """Groups of prompts by concurrency."""
    long: Sequence[PeerPrompt]
    """Prompts whose time to the first token is measured, one at a time."""
    max_tokens: int


def make_plan(
    prompts: Sequence[PeerPrompt],
    long: Sequence[PeerPrompt],
    concurrencies: Sequence[int],
    num_groups: int,
    max_tokens: int,
) -> Plan:
    """Deals out `num_prompts_of(…)` prompts, each once."""
    rest = iter(prompts)
    warm_up = [next(rest) for _ in range(max(concurrencies))]
    groups = {size: [[next(rest) for _ in range(size)] for _ in range(num_groups)] for size in concurrencies}
    return Plan(warm_up, groups, long, max_tokens)


def num_prompts_of(concurrencies: Sequence[int], num_groups: int) -> int:
    """Prompts that a plan uses."""
    return max(concurrencies) + num_groups * sum(concurrencies)


@dataclass
class Outcome:
    """Results by engine, in the order of the plan."""

    results: list[GroupResult] = field(default_factory=list)
    long: list[GroupResult] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Why an engine is missing, or missing from some concurrency on."""


class Interrupted(Exception):
    """Someone asked to stop."""


def run_plan(
    plan: Plan,
    engines: Sequence[Contestant],
    limits: Mapping[str, int],
    on_group: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> Outcome:
    """Measures. `limits` names engines that take only so many prompts at once: they sit out groups that are larger.

    `on_group` is told of each turn. A peer that fails is left out from there on, with its results at that concurrency.
    Raises Interrupted, ServerError.
    """
    outcome = Outcome()
    running = list(engines)

    def turn(prompts: Sequence[PeerPrompt], first: int, max_tokens: int) -> list[GroupResult]:
        results = []
        entrants = [engine for engine in running if len(prompts) <= limits.get(engine.name, len(prompts))]
        for engine in entrants[first % len(entrants) :] + entrants[: first % len(entrants)]:
            if is_stopped():
                raise Interrupted
            on_group(f"{engine.name} at {len(prompts)}")
            try:
                results.append(engine.run_group(prompts, len(prompts), max_tokens))
            except PeerError as error:
                outcome.failures[engine.name] = str(error)
                running.remove(engine)
        return results

    for size in sorted({1, *plan.groups}):
        turn(plan.warm_up[:size], 0, WARM_TOKENS)
    for groups in plan.groups.values():
        found = [result for first, group in enumerate(groups) for result in turn(group, first, plan.max_tokens)]
        outcome.results += [result for result in found if result.mode not in outcome.failures]
    found = [result for first, prompt in enumerate(plan.long) for result in turn([prompt], first, LONG_TOKENS)]
    outcome.long = [result for result in found if result.mode not in outcome.failures]
    order = {engine.name: index for index, engine in enumerate(engines)}
    outcome.results.sort(key=lambda result: order[result.mode])  # stable: groups keep their order
    outcome.long.sort(key=lambda result: order[result.mode])
    return outcome
