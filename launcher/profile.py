"""`dspark profile`: measures what steps cost on this machine, thoroughly, and shows it.

Starts both executors as `dspark serve` would and takes the scheduler's place. The next `serve` with the same models and
sizes finds the result in the cache directory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launcher.models import ModelPair
from launcher.preflight import instance_run_dir
from launcher.profile_plot import plot_costs
from launcher.services import ServeOptions, plan_services
from launcher.settings import LauncherSettings
from launcher.supervisor import StopRequest, Supervisor, new_log_dir, stop_on_signals
from scheduler_service.__main__ import open_transports
from scheduler_service.batch import Batch
from scheduler_service.calibrate_cost import QUICK, THOROUGH, Measurements
from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_file import cost_file_path, fingerprint_of, save_costs
from scheduler_service.cost_model_fit import relative_errors
from scheduler_service.cost_model_start import CostSource
from scheduler_service.settings import SchedulerSettings
from scheduler_service.startup import attach_engine
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings

_EXECUTORS = ("verifier", "drafter")


class ProfileOptions(NamedTuple):
    """Options of `dspark profile`; None leaves a size to the scheduler's environment or default."""

    out: Path
    """JSON file; the plot goes beside it."""
    max_num_seqs: int | None = None
    max_batch_tokens: int | None = None
    is_quick: bool = False
    """As little as `serve` measures at start."""


def run_profile(options: ProfileOptions, pair: ModelPair, common: CommonSettings, settings: LauncherSettings) -> None:
    """Measures, writes the files and prints the fit. Raises ConfigurationError or ServiceDiedError."""
    if pair.drafter is None:
        raise ConfigurationError(f"nothing to profile without a drafter: {pair.note or 'give --drafter'}")
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with stop_on_signals() as stop, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading verifier and drafter", total=None)
        with _running_executors(options, pair, common, settings, stop) as run_dir:
            if run_dir is None:
                return
            sizes = {"max_num_seqs": options.max_num_seqs, "max_batch_tokens": options.max_batch_tokens}
            given = {name: size for name, size in sizes.items() if size is not None}
            scheduler = load_settings(SchedulerSettings, verify_mode="compact", **given)
            transports = open_transports(scheduler, common.model_copy(update={"run_dir": run_dir}))
            engine = attach_engine(scheduler, *transports)
            source = CostSource(
                Batch(engine.limits),
                engine.verifier,
                engine.target,
                itertools.count(1),
                engine.drafter,
                engine.drafter_info,
            )
            progress.update(task, description="measuring steps", total=1.0)

            def on_progress(share: float) -> None:
                if stop.count:
                    raise KeyboardInterrupt
                progress.update(task, completed=share)

            costs, measured = source.measure(QUICK if options.is_quick else THOROUGH, on_progress)
            fingerprint = fingerprint_of(engine.target, engine.drafter_info, engine.limits, is_one_process=False)
    assert costs.model is not None
    assert measured is not None
    for path in (options.out, cost_file_path(common.cache_dir, fingerprint)):
        save_costs(path, fingerprint, costs)
    plot = options.out.with_suffix(".png")
    plot_costs(costs.model, measured, f"{pair.served_name}, {engine.target.device}", plot)
    for line in describe(costs.model, measured):
        console.print(line, soft_wrap=True)
    console.print(
        f"{options.out} and {plot} written; the next dspark serve uses them", style="bold green", soft_wrap=True
    )


def describe(model: CostModel, measured: Measurements) -> list[str]:
    """The fit and how far the points are from it, in words."""
    errors = relative_errors(model, measured.steps, measured.drafts)
    return [
        str(model).replace("; ", "\n"),
        *(
            f"{name}: {each.size} shapes, the fit is off by {100 * np.median(np.abs(each)):.1f} % (median), at most "
            f"{100 * np.max(np.abs(each)):.1f} %"
            for name, each in errors.items()
        ),
        f"single measurements are off their shape's median by {100 * measured.spread:.1f} % (median)",
    ]


@contextlib.contextmanager
def _running_executors(
    options: ProfileOptions, pair: ModelPair, common: CommonSettings, settings: LauncherSettings, stop: StopRequest
) -> Iterator[Path | None]:
    """Verifier and drafter; yields their run directory, or None if asked to stop before they were ready."""
    serve = ServeOptions(
        verify_mode="compact", max_num_seqs=options.max_num_seqs, max_batch_tokens=options.max_batch_tokens
    )
    with instance_run_dir(common.run_dir) as run_dir:
        plans = [plan for plan in plan_services(serve, pair, common, settings, run_dir) if plan.name in _EXECUTORS]
        supervisor = Supervisor(plans, run_dir, new_log_dir(common.cache_dir, settings.keep_logs), settings)
        try:
            supervisor.start()
            yield run_dir if supervisor.wait_ready(serve.url, stop, lambda name: None) else None
        finally:
            supervisor.stop(stop)
