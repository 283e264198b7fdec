"""`dspark calibrate`: makes a drafter's confidences mean what they say.

Answers prompts with whole blocks verified and the head's own confidences, greedily, seeded and with rejection sampling,
and fits `calibration.json` to what came of them. Half of the prompts, or others given, judge the result.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dspark.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.prompts import Prompt, load_prompts
from drafter_service.calibration import FILE_NAME, FORMAT, SETTING, fingerprints
from drafter_service.pair import check_pair
from launcher.client import Client, new_answer
from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import StopRequest, stop_on_signals
from service_kit.errors import ConfigurationError
from service_kit.rpc import open_channel, socket_address
from service_kit.settings import CommonSettings
from training.calibration_error import mean_error
from training.calibration_plot import RegimePlot, plot_calibration
from training.calibration_report import REGIMES, RegimeReport, file_content, fit_regimes, halves
from training.rounds import Rounds, read_rounds

_MAX_INFO_BYTES, _INFO_TIMEOUT_S = 2**20, 5.0


class CalibrateOptions(NamedTuple):
    """Options of `dspark calibrate`."""

    prompts: Sequence[Path]
    held_out: Sequence[Path] = ()
    """Prompts that judge the result; empty: half of `prompts`."""
    limit: int = 50
    """Prompts taken from each file."""
    max_tokens: int = 128
    temperature: float = 1.0
    """Of sampled answers."""
    concurrency: int = 8
    out: Path | None = None
    """None: beside the drafter."""
    plot: Path | None = None
    """None: beside `out`."""


def run_calibrate(
    options: CalibrateOptions, pair: ModelPair, common: CommonSettings, settings: LauncherSettings
) -> None:
    """Answers, fits, writes file and plot. Raises ConfigurationError, ServiceDiedError or ServerError."""
    if pair.drafter is None:
        raise ConfigurationError(f"nothing to calibrate without a drafter: {pair.note or 'give --drafter'}")
    checked = check_pair(pair.drafter, pair.target)
    if not checked.config.has_confidence_head:
        raise ConfigurationError(f"{pair.drafter} has no confidence head: there is nothing to calibrate")
    out = options.out or pair.drafter / FILE_NAME
    if not os.access(out.parent, os.W_OK):
        raise ConfigurationError(
            f"{out.parent} cannot be written: give --out, and serve with {SETTING} set to that file", field="--out"
        )
    groups = [load_prompts(paths, options.limit) for paths in (options.prompts, options.held_out) if paths]
    console = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="dspark-calibrate-") as work, stop_on_signals() as stop:
        trace = Path(work) / "rounds.jsonl"
        formats, split_at = _record(options, groups, trace, pair, common, settings, stop, console)
        rounds = read_rounds(trace, checked.config.block_size)
    parts = {regime: _split(own, split_at) for regime, own in rounds.items()}
    reports = fit_regimes(*({regime: part[i] for regime, part in parts.items()} for i in range(2)))
    about = {
        "format": FORMAT,
        "block_size": checked.config.block_size,
        "fingerprints": fingerprints(checked),
        "weight_formats": formats,
        "prompts": {
            "fitted": _counts(groups[0]),
            "held_out": _counts(groups[1]) if len(groups) > 1 else "every other answer of the same",
        },
        "sampling": {"max_tokens": options.max_tokens, "temperature": {"greedy": 0.0, "sampled": options.temperature}},
    }
    write_calibration(out, options.plot or out.with_suffix(".png"), reports, about, pair.served_name)
    console.print(table_of(reports))
    is_found = out == pair.drafter / FILE_NAME
    how = "the next dspark serve uses it" if is_found else f"to use it, serve with {SETTING} set to it"
    console.print(f"{out} written; {how}", style="bold green", soft_wrap=True)


def write_calibration(
    out: Path, plot: Path, reports: dict[str, RegimeReport], about: dict[str, Any], title: str
) -> None:
    """Writes the file, whole or not at all, and the plot."""
    temporary = out.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(file_content(reports, about), indent=1) + "\n", encoding="utf-8")
    temporary.replace(out)
    shown = {regime: RegimePlot(each.before, each.after, each.sweep) for regime, each in reports.items()}
    plot_calibration(shown, f"{title}, held-out prompts", plot)


def table_of(reports: dict[str, RegimeReport]) -> Table:
    """Calibration error by regime and position, in per cent. "T only" is the published scaling, "chance" what a perfect
    prediction would have on as many rounds."""
    table = Table(title="expected calibration error of survivals on held-out prompts, %")
    for heading in ("regime", "draft", "rounds", "before", "T only", "after", "chance", "T", "shift"):
        table.add_column(heading, justify="left" if heading == "regime" else "right")
    for regime, report in reports.items():
        columns = (report.before, report.temperatures_only, report.after)
        for position, bins in enumerate(zip(*columns, *report.terms, strict=True), 1):
            *errors, temperature, shift = bins
            cells = [f"{100 * each.error:.1f}" for each in errors]
            chance = f"{100 * report.after[position - 1].noise_floor:.1f}"
            count = str(report.after[position - 1].counts.sum())
            table.add_row(regime, str(position), count, *cells, chance, f"{temperature:.2f}", f"{shift:+.2f}")
        means = (f"{100 * mean_error(bins):.2f}" for bins in columns)
        table.add_row(regime, "mean", "", *means, "", "", "", style="bold", end_section=True)
    return table


def _record(
    options: CalibrateOptions,
    groups: Sequence[Sequence[Prompt]],
    trace: Path,
    pair: ModelPair,
    common: CommonSettings,
    settings: LauncherSettings,
    stop: StopRequest,
    console: Console,
) -> tuple[dict[str, str], int | None]:
    """Answers all prompts in all regimes into `trace`; returns the weight formats, and the number of the first request
    of the second group, if there is one."""
    serve = ServeOptions(
        port=free_port_pair(),
        verify_mode="static",
        max_num_seqs=options.concurrency,
        trace_file=trace,
        changes=((SETTING, "none"), ("DSPARK_SCHEDULER_MAX_PREFILL_DECODE_STEPS", "0")),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    split_at = None
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=sum(map(len, groups)) * len(REGIMES))
        with running_server(serve, pair, common=common, settings=settings, stop=stop) as server:
            if server is None:
                raise ConfigurationError("interrupted: nothing is written")
            formats = _weight_formats(server.run_dir)
            for group in groups:
                if group is not groups[0]:
                    split_at = _num_requests(trace)
                for regime in REGIMES:
                    progress.update(task, description=regime)
                    _ask_all(options, server.url, group, regime, stop, lambda: progress.advance(task))
    return formats, split_at


def _ask_all(
    options: CalibrateOptions,
    url: str,
    prompts: Sequence[Prompt],
    regime: str,
    stop: StopRequest,
    on_answer: Callable[[], None],
) -> None:
    client = Client(url)

    def ask(index: int) -> None:
        if stop.count:
            raise ConfigurationError("interrupted: nothing is written")
        temperature = 0.0 if regime == "greedy" else options.temperature
        parameters: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": temperature, "top_p": 1.0}
        if regime == "coupled":
            parameters["seed"] = index  # each its own: answers with one seed share their noise
        for _ in client.chat([{"role": "user", "content": prompts[index].text}], new_answer(), **parameters):
            pass
        on_answer()

    try:
        with ThreadPoolExecutor(options.concurrency) as pool:
            list(pool.map(ask, range(len(prompts))))
    finally:
        client.close()


def _weight_formats(run_dir: Path) -> dict[str, str]:
    calls: dict[str, tuple[Any, Any]] = {
        "drafter": (drafter_pb2_grpc.DrafterServiceStub, drafter_pb2.DrafterServiceGetInfoRequest()),
        "target": (verifier_pb2_grpc.VerifierServiceStub, verifier_pb2.VerifierServiceGetInfoRequest()),
    }
    formats = {}
    for name, (stub, request) in calls.items():
        address = socket_address(run_dir, "verifier" if name == "target" else name)
        with open_channel(address, max_message_bytes=_MAX_INFO_BYTES) as channel:
            formats[name] = str(stub(channel).GetInfo(request, timeout=_INFO_TIMEOUT_S).weight_format)
    return formats


def _num_requests(trace: Path) -> int:
    """Requests in the trace, which counts them from 0."""
    lines = trace.read_text(encoding="utf-8").splitlines()
    return 1 + max((each["request"] for line in lines for each in json.loads(line)["rounds"]), default=-1)


def _split(rounds: Rounds, split_at: int | None) -> tuple[Rounds, Rounds]:
    if split_at is None:
        return halves(rounds)
    requests = np.unique(rounds.requests)
    return rounds.of_requests(requests[requests < split_at]), rounds.of_requests(requests[requests >= split_at])


def _counts(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Prompts of each file."""
    return dict(Counter(prompt.prompt_class for prompt in prompts))
