"""The rows of `dspark bench equality` and its reference answers, in a file from which a later run goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding

from bench.equality_matrix import Variation
from bench.report import fingerprint
from launcher.models import ModelPair
from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError

_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("kernels", "service_kit", "verifier_service", "drafter_service", "scheduler_service", "gateway")
_SHOWN_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avxvnni", "avx512vnni", "avx512bf16", "amx-int8")


class Answers(NamedTuple):
    """What the reference gave."""

    token_ids: list[list[int]]
    num_prompt_tokens: list[int]


class Row(NamedTuple):
    """Outcome of one variation."""

    weight_format: str
    sampling: str
    factor: str
    value: str
    concurrency: int
    num_answers: int
    """Answers compared."""
    num_tokens: int
    """Tokens of these answers."""
    num_different: int
    """Answers that differ from the reference's."""
    num_preemptions: int
    mean_committed: float
    """Tokens committed a step, all requests together."""
    mean_accepted: float | None
    """Drafts accepted a verify row."""
    longest_prompt_steps: int | None
    """Steps that computed the long prompt alone."""
    duration_s: float
    fault: str
    """What is wrong, in words; empty: equal, and what was varied really happened."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Which row of the matrix it is."""
        return self.weight_format, self.sampling, self.factor, self.value


def sources_digest() -> str:
    """Of every source file that a text, or this matrix, could depend on."""
    digest = hashlib.sha256()
    sources = [path for name in _SOURCES for path in (_ROOT / name).rglob("*.py")]
    for path in sorted([*sources, *(_ROOT / "bench").glob("equality*.py")]):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def machine_features() -> list[str]:
    """Which instruction sets the kernels may use here, by LLVM's names; those that matter to them."""
    features: Any = llvmlite.binding.get_host_cpu_features()
    return [name for name in _SHOWN_FEATURES if features.get(name)]


def identity(pair: ModelPair, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """What rows must share to be of one matrix: machine, versions, sources, models and sizes."""
    models = [pair.target] if pair.drafter is None else [pair.target, pair.drafter]
    return {
        **fingerprint(),
        "features": machine_features(),
        "sources": sources_digest(),
        "model": pair.served_name,
        "checkpoints": [Checkpoint(str(path)).fingerprint for path in models],
        "num_prompts": num_prompts,
        "max_tokens": max_tokens,
    }


class Record:
    """Rows and reference answers so far; written to `path`, if there is one, after each row."""

    def __init__(self, path: Path | None, state: dict[str, Any]) -> None:
        """Reads what an earlier run left. Raises ConfigurationError if that was in another `state` (see `identity`)."""
        self._path, self._state = path, state
        self.rows: list[Row] = []
        self.references: dict[str, Answers] = {}
        if path is None or not path.exists():
            return
        try:
            content = json.loads(path.read_text())
            found = content["environment"]
            self.rows = [Row(**row) for row in content["rows"]]
            self.references = {key: Answers(**answers) for key, answers in content["references"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} is no record of this command: give another --json", field="json"
            ) from error
        if changed := [key for key in {**state, **found} if state.get(key) != found.get(key)]:
            raise ConfigurationError(
                f"{path} is of another state ({', '.join(changed)} changed): remove it or give another --json",
                field="json",
            )

    def row(self, weight_format: str, sampling: str, variation: Variation) -> Row | None:
        """The finished row, or None."""
        key = (weight_format, sampling, variation.factor, variation.value)
        return next((row for row in self.rows if row.key == key), None)

    def add(self, row: Row, reference: Answers | None = None) -> None:
        """Keeps a finished row, and its answers if it is the reference."""
        self.rows.append(row)
        if reference is not None:
            self.references[f"{row.weight_format} {row.sampling}"] = reference
        if self._path is None:
            return
        content = {
            "environment": self._state,
            "rows": [each._asdict() for each in self.rows],
            "references": {key: answers._asdict() for key, answers in self.references.items()},
        }
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(json.dumps(content) + "\n")
        os.replace(partial, self._path)

    def reference(self, weight_format: str, sampling: str) -> Answers:
        """The reference's answers, which come before any other row."""
        return self.references[f"{weight_format} {sampling}"]


def has_passed(rows: Sequence[Row]) -> bool:
    """Whether nothing is wrong with any row."""
    return not any(row.fault for row in rows)
