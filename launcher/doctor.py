"""`dspark doctor`: what this machine offers, whether the checkpoints fit, and a measured self-test. In words."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from launcher.models import ModelPair, choose_models
from launcher.settings import LauncherSettings
from service_kit.cpu import available_memory_bytes, cores, cpu_name
from service_kit.errors import ServiceError
from service_kit.settings import CommonSettings, load_settings

_GIB = 2**30
_SHM_DIR = Path("/dev/shm")
_WANTED_MEMORY = 3 * _GIB  # embedded target and drafter in four processes, with the default kv_memory
_WANTED_SHM = _GIB // 4  # feature rings and draft distributions at the default sizes
_WANTED_DISK = _GIB


class Verdict(Enum):
    """Outcome of a check: mark and colour."""

    GOOD = ("ok", "green")
    WARNING = ("warning", "yellow")
    BAD = ("wrong", "bold red")


class Finding(NamedTuple):
    """One checked thing."""

    verdict: Verdict
    subject: str
    words: str


def run_doctor(model: str | None, drafter: str | None) -> bool:
    """Prints findings as they are made. False if anything is wrong; warnings do not count."""
    console = Console(highlight=False)
    common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
    is_well = True
    for finding in _findings(model, drafter, common, settings):
        mark, style = finding.verdict.value
        console.print(Text(f"{mark:>8}", style), f"{finding.subject}: {finding.words}", soft_wrap=True, markup=False)
        is_well &= finding.verdict is not Verdict.BAD
    console.print(Text("all good" if is_well else "something is wrong: see above", "green" if is_well else "bold red"))
    return is_well


def _findings(
    model: str | None, drafter: str | None, common: CommonSettings, settings: LauncherSettings
) -> Iterator[Finding]:
    yield from environment_findings(common)
    try:
        pair = choose_models(model, drafter, common, settings)
    except ServiceError as error:
        yield Finding(Verdict.BAD, "checkpoints", error.message)
        return
    yield Finding(Verdict.GOOD, "target", f"{pair.served_name} ({pair.target})")
    if pair.drafter is None:
        yield Finding(Verdict.WARNING, "drafter", pair.note)
    else:
        yield Finding(Verdict.GOOD, "drafter", f"{pair.drafter} fits this target")
    yield from _self_test(pair, common, settings)


def environment_findings(common: CommonSettings) -> Iterator[Finding]:
    """Interpreter, libraries, processor, memory, shared memory and disk."""
    import torch

    from kernels.cpu.features import LEVEL, describe

    yield Finding(Verdict.GOOD, "python", f"{platform.python_version()}, torch {torch.__version__}")
    yield Finding(Verdict.WARNING if LEVEL == "generic" else Verdict.GOOD, "cpu", f"{cpu_name()}, {describe()}")
    have = cores()
    words = f"{have.usable} for each executor, unless set lower ({os.cpu_count()} cores, {have})"
    yield Finding(Verdict.GOOD, "threads", words)
    yield _room("memory", available_memory_bytes(), _WANTED_MEMORY, "close programs, or lower --kv-memory")
    if _SHM_DIR.is_dir():
        free = shutil.disk_usage(_SHM_DIR).free
        yield _room(
            "shared memory", free, _WANTED_SHM, "enlarge /dev/shm (shm_size in a container), or lower --max-num-seqs"
        )
    try:
        common.cache_dir.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(common.cache_dir, os.W_OK)
    except OSError:
        is_writable = False
    if is_writable:
        free = shutil.disk_usage(common.cache_dir).free
        yield _room(f"cache {common.cache_dir}", free, _WANTED_DISK, "free some, or set DSPARK_CACHE_DIR")
    else:
        yield Finding(Verdict.BAD, "cache", f"{common.cache_dir} cannot be written: set DSPARK_CACHE_DIR")


def _room(subject: str, free: int, wanted: int, advice: str) -> Finding:
    words = f"{free / _GIB:.1f} GiB free"
    if free >= wanted:
        return Finding(Verdict.GOOD, subject, words)
    return Finding(Verdict.WARNING, subject, f"{words}, {wanted / _GIB:.2g} GiB wanted: {advice}")


def _self_test(pair: ModelPair, common: CommonSettings, settings: LauncherSettings) -> Iterator[Finding]:
    from launcher.client import ServerError
    from launcher.selftest import run_self_test
    from launcher.supervisor import ServiceDiedError

    try:
        outcome = run_self_test(pair, common, settings)
    except (ServiceError, ServerError, ServiceDiedError) as error:
        yield Finding(Verdict.BAD, "self-test", str(error))
        return
    yield Finding(Verdict.GOOD, "weights", f"{outcome.weight_format}: {outcome.weight_format_reason}")
    if outcome.inexact_reason:
        yield Finding(Verdict.WARNING, "exact rows", f"not bit-exact: {outcome.inexact_reason}")
    else:
        yield Finding(Verdict.GOOD, "exact rows", "each row's bits depend on that row alone")
    yield Finding(Verdict.GOOD, "self-test", f"plain decoding {outcome.off_tokens_per_second:.1f} tokens/s")
    if outcome.accepted_length is None:
        return
    if outcome.num_equal < outcome.num_prompts:
        num_changed = outcome.num_prompts - outcome.num_equal
        words = f"{num_changed} of {outcome.num_prompts} greedy answers change with speculation"
        advice = "serve with --verify-mode off and report this with the lines above"
        yield Finding(Verdict.BAD, "losslessness", f"{words}: {advice}")
    else:
        yield Finding(Verdict.GOOD, "losslessness", f"{outcome.num_equal} greedy answers equal with and without drafts")
    is_calibrated = not outcome.calibration.startswith("none")
    yield Finding(Verdict.GOOD if is_calibrated else Verdict.WARNING, "calibration", outcome.calibration)
    yield _acceptance(outcome.accepted_length, outcome.static_tokens_per_second / outcome.off_tokens_per_second)


def _acceptance(accepted_length: float, speedup: float) -> Finding:
    words = f"accepted length {accepted_length:.2f}, whole blocks run at {speedup:.2f} times plain decoding"
    if accepted_length < 1.1:
        return Finding(
            Verdict.BAD,
            "acceptance",
            f"{words}: drafts are almost never accepted, so this drafter was made for another target, or its feature "
            "layers or slots follow another convention",
        )
    if accepted_length < 1.4:
        return Finding(Verdict.WARNING, "acceptance", f"{words}: a weak drafter for these prompts; it may not pay")
    return Finding(Verdict.GOOD, "acceptance", words)
