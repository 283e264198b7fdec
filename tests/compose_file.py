"""Compose files as data: variables filled in, overrides merged. Only what this repository's files use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SERVICES = ("verifier", "drafter", "scheduler", "gateway")
OBSERVERS = ("collector", "jaeger", "prometheus", "grafana")
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")
_SIZE = re.compile(r"(\d+)([kmg]?)b?")


def load_project(*names: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The project that files `names` of the repository's root describe together; anchors' `x-` sections dropped.

    Raises KeyError for a required variable without a value.
    """
    project: dict[str, Any] = {}
    for name in names:
        project = _merge(project, _fill_in(yaml.safe_load((ROOT / name).read_text()), variables or {}))
    return {key: value for key, value in project.items() if not key.startswith("x-")}


def variables_of(name: str) -> set[str]:
    """Variables that a file reads."""
    return {match[1] for match in _VARIABLE.finditer((ROOT / name).read_text())}


def size_bytes(value: str | int) -> int:
    """Bytes of a size as compose writes it, e.g. "512m"."""
    match = _SIZE.fullmatch(str(value).lower())
    assert match, value
    return int(match[1]) * 1024 ** " kmg".index(match[2] or " ")


def image_environment(dockerfile: Path = ROOT / "docker" / "Dockerfile") -> dict[str, str]:
    """ENV of the Dockerfile's stage `runtime`, on which both images stand."""
    text = dockerfile.read_text().replace("\\\n", " ")
    stage = text.partition(" AS runtime\n")[2].partition("\nFROM ")[0]
    line = next(line for line in stage.splitlines() if line.startswith("ENV "))
    return dict(pair.split("=", 1) for pair in line.removeprefix("ENV ").split())


def copied_paths(dockerfile: Path = ROOT / "docker" / "Dockerfile") -> list[str]:
    """What the image takes from the repository into /app."""
    stage = dockerfile.read_text().partition("FROM scratch AS source\n")[2].partition("\nFROM ")[0]
    words = [line.split()[1:-1] for line in stage.splitlines() if line.startswith("COPY ")]
    return [path for each in words for path in each]


def _fill_in(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _fill_in(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [_fill_in(each, variables) for each in value]
    return _VARIABLE.sub(lambda match: _value_of(match, variables), value) if isinstance(value, str) else value


def _value_of(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name, operator, words = match.groups()
    if variables.get(name):
        return variables[name]
    if operator == ":-":
        return str(words)
    raise KeyError(f"{name}: {words}")


def _merge(base: Any, override: Any) -> Any:
    if isinstance(base, dict) and isinstance(override, dict):
        return {key: _merge(base.get(key), override.get(key, base.get(key))) for key in {**base, **override}}
    # Lists have rules of their own in compose, key by key: these files override none.
    assert base is None or base == override or not isinstance(override, list), (base, override)
    return override
