"""Cost tables for the simulator: measured ones as `dspark profile` writes them, and made-up ones that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scheduler_service.cost_model import CostModel, Floats
from service_kit.errors import ConfigurationError

_SHIPPED = Path(__file__).parent / "tables"


class CostTable(NamedTuple):
    """What the simulated engine's steps cost."""

    name: str
    """The file's stem."""
    model: CostModel


def shipped_tables() -> list[str]:
    """Names of the tables that come with the simulator."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def load_table(name: str) -> CostTable:
    """A shipped table by its name, or any file. Raises ConfigurationError naming the file and what is wrong."""
    path = _SHIPPED / f"{name}.json" if name in shipped_tables() else Path(name).expanduser()
    try:
        return CostTable(path.stem, _parse(json.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise ConfigurationError(
            f"cost table {name}: {error}: give a file of dspark profile or one of {', '.join(shipped_tables())}"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"cost table {path}, line {error.lineno}: {error.msg}") from error
    except (ConfigurationError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"cost table {path}: {what}") from error


def _parse(content: Any) -> CostModel:
    raw = content["model"]
    if raw is None:
        raise ConfigurationError("measured without a drafter: measure again with dspark profile")
    return CostModel(
        float(raw["bias_ns"]),
        float(raw["row_ns"]),
        float(raw["context_ns"]),
        _curve(raw["token_ns"]),
        {int(length): _curve(curve) for length, curve in raw["block_draft_ns"].items()},
    )


def _curve(raw: Any) -> Floats:
    """[largest size + 1]: every entry, or {"at": sizes, "ns": their times}; a size then costs what the next one does
    (tiers), or with "between": "linear" what lies between its neighbours."""
    if isinstance(raw, list):
        return np.array(raw, np.float64)
    at, times = np.array(raw["at"], np.intp), np.array(raw["ns"], np.float64)
    if at.shape != times.shape or at[0] != 0 or (np.diff(at) <= 0).any():
        raise ConfigurationError('"at" must rise from 0 and have a time in "ns" for each size')
    sizes = np.arange(at[-1] + 1)
    if raw.get("between") == "linear":
        return np.interp(sizes, at, times)
    return times[np.searchsorted(at, sizes)]
