"""The prompts of `dspark bench equality`: many short ones of several kinds, and one that every chunk size cuts."""

from __future__ import annotations

from bench.prompts import Prompt

_SUBJECTS = (
    "the tides",
    "compound interest",
    "a library of old maps",
    "how bread rises",
    "prime numbers",
    "the gears of a bicycle",
    "a queue at the post office",
    "migrating birds",
)
_TASKS = {
    "explain": "Explain {} to a ten-year-old.",
    "code": "Write a small Python class that models {}, with a docstring and an example.",
    "poem": "Write a short rhyming poem about {}.",
    "facts": "List five facts about {}, numbered from 1 to 5.",
    "dialogue": "Write a dialogue between a teacher and a student about {}.",
    "french": "Write two sentences about {} in French, then translate them into English.",
}
_NUM_LISTED = 36
MAX_PROMPTS = len(_SUBJECTS) * len(_TASKS)


def _prompt(index: int) -> Prompt:
    """Every task comes once in each run of six, with another subject each time."""
    task = index % len(_TASKS)
    name, template = list(_TASKS.items())[task]
    return Prompt(name, template.format(_SUBJECTS[(index // len(_TASKS) + task) % len(_SUBJECTS)]))


def short_prompts(count: int) -> list[Prompt]:
    """The first `count` of MAX_PROMPTS prompts; all lie within one default chunk."""
    return [_prompt(index) for index in range(count)]


def long_prompt() -> Prompt:
    """About 700 tokens."""
    lines = [f"{index}. {_prompt(index - 1).text}" for index in range(1, _NUM_LISTED + 1)]
    task = "These are the requests of one day. Which one is the hardest to answer well, and why?"
    return Prompt("long", "\n".join([task, *lines]))
