"""Benchmark prompts from JSON lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from service_kit.errors import ConfigurationError


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
