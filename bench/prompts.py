"""Benchmark prompts from JSON lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from service_kit.errors import ConfigurationError

ALL = "all"
"""Class of what is over prompts of several files."""


class Prompt(NamedTuple):
    """One user turn and the file it is from."""

    prompt_class: str
    """Name of its file: results are reported by it."""
    text: str


def load_prompts(paths: Sequence[Path], limit: int) -> list[Prompt]:
    """The first `limit` prompts of each file; a directory stands for its *.jsonl files.

    A line is `{"turns": ["…", …]}` (the first turn is used) or `{"prompt": "…"}`. Raises ConfigurationError naming the
    file and line that is neither.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    prompts = [prompt for file in files for prompt in _read(file, limit)]
    if not prompts:
        raise ConfigurationError(f"no prompts in {', '.join(map(str, paths))}", field="--prompts")
    return prompts


def make_groups(prompts: Sequence[Prompt], size: int, *, is_mixed: bool, repeats: int | None) -> list[list[Prompt]]:
    """Prompts that run together, `size` at a time: of one class, or (`is_mixed`) of all classes in turn.

    Without `repeats` every prompt comes once, so the last group of a class may be smaller. With it there are so many
    groups of each class, all full: prompts come again where there are too few.
    """
    names = dict.fromkeys(prompt.prompt_class for prompt in prompts)
    classes = [[prompt for prompt in prompts if prompt.prompt_class == name] for name in names]
    if is_mixed:
        classes = [[prompt for prompt in chain.from_iterable(zip_longest(*classes)) if prompt is not None]]
    if repeats is None:
        return [own[start : start + size] for own in classes for start in range(0, len(own), size)]
    return [
        [own[(index * size + offset) % len(own)] for offset in range(size)]
        for own in classes
        for index in range(repeats)
    ]


def _read(file: Path, limit: int) -> Iterator[Prompt]:
    try:
        with file.open(encoding="utf-8") as opened:
            lines = opened.readlines()  # not splitlines: JSON strings may hold separators that it knows
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}", field="--prompts") from error
    for number, line in enumerate(lines[:limit], 1):
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigurationError(f'{file}:{number} has no "turns" or "prompt"', field="--prompts") from error
        yield Prompt(file.stem, str(text))
