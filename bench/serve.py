"""`dspark bench serve`: verify modes side by side on running servers, one of which works at a time.

Groups of `concurrency` prompts go to every mode in turn, so that each group is a paired measurement and slow drift of
the machine hits all modes alike. Answers are compared before any speed is shown.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.comparison import judge
from bench.equality import find_divergences, logit_margins
from bench.measure import Engine, GroupResult
from bench.modes import ModeSpec
from bench.peer import NAME as PEER
from bench.peer import TransformersPeer
from bench.prompts import ALL, Prompt, load_prompts, make_groups
from bench.report import print_tables, write_csv, write_json
from bench.serve_plot import plot_rows
from bench.serve_rows import make_rows
from launcher.models import ModelPair, choose_models
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import RunningServer, running_server
from launcher.supervisor import StopRequest, stop_on_signals
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings

_CHECK_TOKENS = 32
_MAX_SHOWN = 10
_FILE_WIDTH = 200
_TOKENS_A_SEQUENCE = 8
"""Token rows of a step for each request: an anchor and a block of the embedded drafter."""
_MIN_BATCH_TOKENS = 256
_NO_PREFIX_CACHE = ("DSPARK_SCHEDULER_PREFIX_CACHE", "off")
"""A prompt must cost as much when it comes again."""
ONE_PROCESS = "-1p"
"""Suffix of modes measured in a single process."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of `dspark bench serve`."""

    prompts: tuple[Path, ...]
    concurrencies: tuple[int, ...]
    modes: tuple[ModeSpec, ...]
    limit: int
    max_tokens: int
    temperature: float
    seed: int | None
    repeats: tuple[int, ...] = ()
    """Groups of each class (mixed: in all) at each concurrency, or at all of them alike; empty: as many as give every
    prompt once."""
    is_mixed: bool = False
    """Whether groups hold prompts of all classes."""
    kv_memory: str | None = None
    max_batch_tokens: int | None = None
    """None: whole blocks for all requests."""
    json_out: Path | None = None
    csv_out: Path | None = None
    png_out: Path | None = None
    peer: str | None = None
    in_process: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigurationError if repeats do not fit the concurrencies."""
        if len(self.repeats) not in (0, 1, len(self.concurrencies)):
            raise ConfigurationError(
                f"{len(self.repeats)} repeats for {len(self.concurrencies)} concurrencies: give one, or one for each",
                field="--repeats",
            )

    def num_groups(self, concurrency: int) -> int | None:
        """Groups of each class at a concurrency; None: as many as give every prompt once."""
        if len(self.repeats) < 2:
            return self.repeats[0] if self.repeats else None
        return self.repeats[self.concurrencies.index(concurrency)]

    @property
    def is_reproducible(self) -> bool:
        """Whether the measured answers themselves must be equal in every mode."""
        return self.temperature == 0 or self.seed is not None

    def parameters(self) -> dict[str, Any]:
        """Request fields of the measured requests."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "return_token_ids": True,
            **seed,
        }


def run_bench(options: BenchOptions, model: str | None, drafter: str | None) -> bool:
    """Measures, checks, prints. False if the output check failed: no speed is printed then.

    Raises ConfigurationError, ServiceDiedError or ServerError.
    """
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    prompts = load_prompts(options.prompts, options.limit)
    require_full_groups(options, prompts)
    common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
    pair = choose_models(model, drafter, common, settings)
    if pair.drafter is None and any(spec.verify_mode != "off" for spec in options.modes):
        raise ConfigurationError(f"{pair.note}: only --modes off can be measured", field="--modes")
    peer = TransformersPeer(pair.target) if options.peer else None
    with stop_on_signals() as stop, _engines(options, pair, common, settings, stop) as engines:
        results = _run_all(options, engines, prompts, peer, stop, console)
        checked = results if options.is_reproducible else _check_run(engines, prompts, stop)
    if stop.count:
        raise ConfigurationError("interrupted: nothing is reported")
    check = _check(checked, engines[0].mode, pair.target, console)
    if not check["passed"]:
        console.print("[bold red]outputs differ: no speed is reported[/bold red]")
        return False
    rows, verdicts = make_rows(results, engines[0].mode), judge(results, options.modes)
    print_tables(console, rows, verdicts, engines[0].mode)
    if options.json_out:
        described = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
        described["prompts"] = [path.name for path in options.prompts]
        write_json(options.json_out, rows, verdicts, {**described, "model": pair.served_name}, check)
    if options.csv_out:
        write_csv(options.csv_out, rows)
    if options.png_out:
        traffic = "mixed" if options.is_mixed else "class by class"
        title = f"{pair.served_name}, {options.max_tokens} tokens an answer, {traffic}"
        plot_rows(rows, rows[-1]["class"], title, options.png_out)
    return True


def require_full_groups(options: BenchOptions, prompts: Sequence[Prompt]) -> None:
    """Without repeats no prompt comes twice: raises ConfigurationError if a class (of mixed traffic: all prompts) has
    fewer than are to run at once."""
    if options.repeats:
        return
    sizes = Counter(ALL if options.is_mixed else prompt.prompt_class for prompt in prompts)
    name, size = min(sizes.items(), key=lambda item: item[1])
    most = max(options.concurrencies)
    if size < most:
        raise ConfigurationError(
            f"{name} has {size} prompts, so {most} of them never run at once: raise --limit, lower --concurrency to "
            f"{size}, or give --repeats, which takes prompts more than once",
            field="--concurrency",
        )


@contextlib.contextmanager
def _engines(
    options: BenchOptions, pair: ModelPair, common: CommonSettings, settings: LauncherSettings, stop: StopRequest
) -> Iterator[list[Engine]]:
    """One warm server for each mode that does not share one (and one more each in a single process, if asked for)."""
    variants = [(spec, one) for spec in options.modes for one in ((False, True) if options.in_process else (False,))]
    most = max(options.concurrencies)
    max_batch_tokens = options.max_batch_tokens or max(_MIN_BATCH_TOKENS, _TOKENS_A_SEQUENCE * most)
    with contextlib.ExitStack() as stack:
        servers: dict[tuple[str, bool], RunningServer] = {}
        for spec, is_one_process in variants:
            if spec.shares:
                continue
            serve = ServeOptions(
                port=free_port_pair(),
                verify_mode=spec.verify_mode,
                max_num_seqs=most,
                max_batch_tokens=max_batch_tokens,
                kv_memory=options.kv_memory,
                in_process=is_one_process,
                changes=(_NO_PREFIX_CACHE, *spec.changes),
            )
            started = stack.enter_context(running_server(serve, pair, common=common, settings=settings, stop=stop))
            if started is None:
                raise ConfigurationError("interrupted while the servers were starting")
            servers[spec.name, is_one_process] = started
        engines = []
        for spec, is_one_process in variants:
            server = servers[spec.shares or spec.name, is_one_process]
            name = f"{spec.name}{ONE_PROCESS}" if is_one_process else spec.name
            engines.append(Engine(name, server.url, server.run_dir, drafts=not spec.shares))
            stack.callback(engines[-1].close)
        yield engines


def _run_all(
    options: BenchOptions,
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    peer: TransformersPeer | None,
    stop: StopRequest,
    console: Console,
) -> list[GroupResult]:
    for engine in engines:
        engine.run_group(prompts[:1], 1, {"max_tokens": 8, "temperature": 0.0})
    results: list[GroupResult] = []
    with Progress(console=console, transient=True) as progress:
        for concurrency in options.concurrencies:
            repeats = options.num_groups(concurrency)
            groups = make_groups(prompts, concurrency, is_mixed=options.is_mixed, repeats=repeats)
            started = time.perf_counter()
            task = progress.add_task(f"concurrency {concurrency}", total=len(groups))
            for index, group in enumerate(groups):
                if stop.count:
                    return results
                # Start with another mode each time: none is always the one after a pause.
                for turn in range(len(engines)):
                    engine = engines[(index + turn) % len(engines)]
                    results.append(engine.run_group(group, concurrency, options.parameters()))
                if peer is not None and concurrency == 1:
                    results.append(peer.run(group[0], options.max_tokens, options.temperature))
                progress.advance(task)
            duration = f"{time.perf_counter() - started:.0f} s"
            console.print(f"concurrency {concurrency}: {len(groups)} groups for each mode, {duration}", highlight=False)
    order = [*(engine.mode for engine in engines), PEER]
    return sorted(results, key=lambda result: order.index(result.mode))  # stable: prompts keep their order


def _check_run(engines: Sequence[Engine], prompts: Sequence[Prompt], stop: StopRequest) -> list[GroupResult]:
    """Short greedy answers of every mode, for the output check of runs that sample without a seed."""
    parameters = {"max_tokens": _CHECK_TOKENS, "temperature": 0.0, "return_token_ids": True}
    ordered = [prompt for prompt in dict.fromkeys(prompts) if not stop.count]
    return [engine.run_group([prompt], 1, parameters) for engine in engines for prompt in ordered]


def _check(results: Sequence[GroupResult], reference: str, model_dir: Path, console: Console) -> dict[str, Any]:
    """Compares the modes' answers and says where they differ."""
    own = [result for result in results if result.mode != PEER]
    num_compared, divergences = find_divergences(own, reference)
    console.print(f"output check: {num_compared - len(divergences)} of {num_compared} answers equal to {reference}")
    margins = logit_margins(model_dir, divergences[:_MAX_SHOWN]) if divergences else []
    lines = [each.describe(margin) for each, margin in zip(divergences, margins, strict=False)]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    return {
        "passed": not divergences,
        "num_compared": num_compared,
        "num_different": len(divergences),
        "reference": reference,
        "divergences": lines,
    }
