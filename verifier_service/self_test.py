"""Whether rows are exact on this machine, found out at start and remembered on disk.

A row's bits may depend on that row alone: a text is then the same at any load, with speculation on or off. Kernels are
written so; this test is for the machine, compiler or library that makes it otherwise.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

import kernels
from kernels.cpu.features import relevant_features
from kernels.cpu.native import num_threads
from kernels.linear import Linear
from kernels.self_test import COUNTS, exact_counts, same_bits
from service_kit.cpu import cpu_name
from verifier_service.model import PAGE_SIZE, TargetModel, TokenRows
from verifier_service.weights import TargetWeights

_HEAD_COUNTS = (1, 2, 3, 8, 17)
"""lm_head is large, and its rows are those of requests that emit: fewer counts of it are tried."""
_PREFIX_LEN, _NUM_OTHERS = 5, 12
"""Rows of the forward tried: a chunk of one request, and first tokens of others."""

logger = logging.getLogger(__name__)


class Findings(NamedTuple):
    """What a self-test found."""

    counts: dict[str, tuple[int, ...]]
    """Row counts to pad to, by kind of linear layer; only kinds that are not exact at every count tried."""
    inexact_reason: str
    """In words, why results depend on the batch; empty when they do not."""


def apply_self_test(target: TargetModel, key: dict[str, str], cache: Path | None) -> Findings:
    """Tests `target`, or takes what an earlier start found under the same key; pads layers that need it.

    `key` names what the result depends on besides this code; `cache` is a file, or None for a test every time.
    """
    key = {**key, **_environment()}
    findings = _remembered(cache, key) if cache else None
    if findings is None:
        findings = _test(target)
        if cache:
            _remember(cache, key, findings)
    else:
        _pad(target.weights, findings.counts)
    if findings.counts:
        logger.warning(
            "rows of linear layers are exact at some counts only and are padded to them: %s", findings.counts
        )
    if findings.inexact_reason:
        logger.warning("not bit-exact: %s", findings.inexact_reason)
    return findings


def _environment() -> dict[str, str]:
    code = hashlib.sha256()
    for folder in (Path(kernels.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            code.update(path.read_bytes())
    return {
        "cpu": f"{cpu_name()} ({relevant_features()})",
        "libraries": ", ".join(f"{name} {metadata.version(name)}" for name in ("numba", "llvmlite", "torch")),
        "code": code.hexdigest()[:16],
        "threads": str(num_threads()),
    }


def _test(target: TargetModel) -> Findings:
    counts: dict[str, tuple[int, ...]] = {}
    inexact = []
    for kind, linear in _kinds(target.weights):
        tried = _HEAD_COUNTS if linear is target.weights.lm_head else COUNTS
        if (exact := exact_counts(linear, linear.num_in, tried)) == tried:
            continue
        if exact:
            counts[kind] = exact
        else:
            inexact.append(kind)
    _pad(target.weights, counts)
    if inexact:
        return Findings(counts, f"no row count of linear layers {', '.join(inexact)} gives rows their own bits")
    if not _is_forward_exact(target):
        return Findings(counts, "rows of a forward differ from the same rows computed alone")
    return Findings(counts, "")


def _kinds(weights: TargetWeights) -> Iterable[tuple[str, Linear]]:
    """One linear layer of every shape and format, by name."""
    return {_kind(linear): linear for linear in weights.linears}.items()


def _kind(linear: Linear) -> str:
    return f"{linear.num_in}x{linear.num_out} of {linear.weight_bytes} bytes"


def _pad(weights: TargetWeights, counts: dict[str, tuple[int, ...]]) -> None:
    for linear in weights.linears:
        linear.exact_counts = counts.get(_kind(linear), ())


def _is_forward_exact(target: TargetModel) -> bool:
    """Compares a step of several requests with the same rows one at a time, in other slots and pages."""
    slots = torch.tensor([0] * _PREFIX_LEN + list(range(1, 1 + _NUM_OTHERS)), dtype=torch.int32)
    positions = torch.tensor([*range(_PREFIX_LEN), *[0] * _NUM_OTHERS], dtype=torch.int32)
    token_ids = (7 * torch.arange(len(slots)) + 1) % target.config.vocab_size
    pages = torch.arange(1 + _NUM_OTHERS, dtype=torch.int32)[:, None]
    space = target.workspace(len(pages), PAGE_SIZE, len(slots))
    logits = target.logits(target.forward(TokenRows(token_ids, positions, slots), pages, space))
    alone = target.workspace(2, PAGE_SIZE, 1)
    for row in (*range(_PREFIX_LEN), len(slots) - 1):
        rows = TokenRows(token_ids[row, None], positions[row, None], slots[row, None].clamp(max=1))
        swapped = torch.tensor([[1], [0]], dtype=torch.int32)
        if not same_bits(target.logits(target.forward(rows, swapped, alone)), logits[row, None]):
            return False
    return True


def _remembered(cache: Path, key: dict[str, str]) -> Findings | None:
    """What `cache` holds if it is of this key; says why not otherwise."""
    try:
        record = json.loads(cache.read_text())
        known, counts = record["key"], {kind: tuple(map(int, some)) for kind, some in record["counts"].items()}
        findings = Findings(counts, str(record["inexact_reason"]))
        changed = [name for name in key if known.get(name) != key[name]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("self-test: %s is not readable (%s): testing anew", cache, error)
        return None
    if changed:
        words = "; ".join(f"{name} was {known.get(name)}, is {key[name]}" for name in changed)
        logger.info("self-test: the remembered one is of another %s (%s): testing anew", " and ".join(changed), words)
        return None
    return findings


def _remember(cache: Path, key: dict[str, str], findings: Findings) -> None:
    record = {"key": key, "counts": findings.counts, "inexact_reason": findings.inexact_reason}
    part = cache.with_suffix(".part")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(record, indent=1))
        part.replace(cache)
    except OSError as error:
        logger.warning("self-test: cannot write %s (%s): the next start tests anew", cache, error)
