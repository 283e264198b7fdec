"""Measured costs as a JSON file that says what they were measured on, and is refused anywhere else."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

import kernels
from scheduler_service.admission import Limits
from scheduler_service.cost_model import CostModel
from scheduler_service.executor_types import DrafterInfo, VerifierInfo
from scheduler_service.prefill_limit import PrefillCosts
from service_kit.errors import ConfigurationError

_FORMAT = 1
_LIBRARIES = ("llvmlite", "numba", "numpy", "torch")
_CODE = ("kernels", "verifier_service", "drafter_service")
"""Folders whose code runs in a step."""

Fingerprint = Mapping[str, str]
"""What measured costs depend on, in words."""


class StoredCosts(NamedTuple):
    """Costs of one engine."""

    model: CostModel | None
    """None without a drafter: nothing asks for it."""
    prefill: PrefillCosts


def fingerprint_of(
    target: VerifierInfo, drafter: DrafterInfo | None, limits: Limits, *, is_one_process: bool
) -> dict[str, str]:
    """Fingerprint of an engine; `is_one_process`: its executors share a process."""
    found = {
        "target": _name(target.model, target.fingerprint),
        "target weight format": target.weight_format,
        "device and threads": target.device,
        "drafter": "none",
    }
    if drafter is not None:
        blocks = drafter.elastic_block_sizes or (drafter.block_size,)
        found |= {
            "drafter": _name(drafter.model, drafter.fingerprint),
            "drafter weight format": drafter.weight_format,
            "drafter device and threads": drafter.device,
            "block sizes": ", ".join(str(size) for size in blocks),
        }
    return found | {
        "max_num_seqs": str(limits.max_num_seqs),
        "max_batch_tokens": str(limits.max_batch_tokens),
        "page size": str(limits.page_size),
        "processes": "one" if is_one_process else "one each",
        "libraries": ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES),
        "code": _code_digest(),
    }


def _name(model: str, fingerprint: str) -> str:
    return f"{Path(model).name} {fingerprint}"  # wherever it lies


@cache
def _code_digest() -> str:
    code = hashlib.sha256()
    root = Path(kernels.__file__).parents[1]
    for path in sorted(path for folder in _CODE for path in (root / folder).rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()[:16]


def cost_file_path(cache_dir: Path, fingerprint: Fingerprint) -> Path:
    """Where the costs of an engine are kept: each in a file of its own."""
    digest = hashlib.sha256(json.dumps(sorted(fingerprint.items())).encode()).hexdigest()
    return cache_dir / "costs" / f"{digest[:16]}.json"


def save_costs(path: Path, fingerprint: Fingerprint, costs: StoredCosts) -> None:
    """Writes the file whole or not at all. Raises OSError."""
    model, prefill = costs.model, costs.prefill
    content = {
        "format": _FORMAT,
        "fingerprint": dict(fingerprint),
        "model": model
        and {
            "bias_ns": model.bias_ns,
            "row_ns": model.row_ns,
            "context_ns": model.context_ns,
            "token_ns": model.token_ns.tolist(),
            "block_draft_ns": {str(length): curve.tolist() for length, curve in model.block_draft_ns.items()},
        },
        "prefill": {
            "decode_ns": prefill.decode_ns,
            "chunk_ns": {str(rows): ns for rows, ns in prefill.chunk_ns.items()},
            "context_ns": prefill.context_ns,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(path)


def load_costs(path: Path, fingerprint: Fingerprint) -> StoredCosts:
    """The costs in a file, for the engine with this fingerprint.

    Raises ConfigurationError naming the file and what is wrong: it cannot be read, was measured on something else, or
    holds costs that cannot be (negative, not monotone, no numbers).
    """
    try:
        return parse_costs(json.loads(path.read_text(), parse_constant=_refuse_constant), fingerprint)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}", field="cost_file") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} holds no measured costs ({error})", field="cost_file") from None


def parse_costs(content: Any, fingerprint: Fingerprint) -> StoredCosts:
    """Costs of a file's content. Raises ConfigurationError as `load_costs` does."""
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigurationError(f"not measured costs of format {_FORMAT}: measure again with dspark profile")
    if differences := differing(content.get("fingerprint") or {}, fingerprint):
        raise ConfigurationError(
            f"measured on another engine: {'; '.join(differences)}. Measure this one with dspark profile"
        )
    try:
        prefill, raw = content["prefill"], content["model"]
        model = raw and CostModel(
            float(raw["bias_ns"]),
            float(raw["row_ns"]),
            float(raw["context_ns"]),
            np.array(raw["token_ns"], np.float64),
            {int(length): np.array(curve, np.float64) for length, curve in raw["block_draft_ns"].items()},
        )
        chunk_ns = {int(rows): float(ns) for rows, ns in prefill["chunk_ns"].items()}
        costs = StoredCosts(model, PrefillCosts(float(prefill["decode_ns"]), chunk_ns, float(prefill["context_ns"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"damaged ({type(error).__name__}: {error}): measure again") from None
    if not chunk_ns or min(*chunk_ns.values(), costs.prefill.decode_ns) <= 0 or costs.prefill.context_ns < 0:
        raise ConfigurationError(f"prefill costs that cannot be ({costs.prefill}): measure again")
    return costs


def differing(stored: Fingerprint, expected: Fingerprint) -> list[str]:
    """What differs, in words."""
    return [
        f"{name} is {stored.get(name, 'not given')!r} there and {expected.get(name, 'not given')!r} here"
        for name in dict.fromkeys((*expected, *stored))
        if stored.get(name) != expected.get(name)
    ]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no time")
