"""`dspark bench serve`: verify modes side by side on running servers, one of which works at a time.

Groups of `concurrency` prompts go to every mode in turn, so that each group is a paired measurement and slow drift of
the machine hits all modes alike. Answers are compared before any speed is shown.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.equality import find_divergences, logit_margins
from bench.measure import Engine, GroupResult
from bench.peer import NAME as PEER
from bench.peer import TransformersPeer
from bench.prompts import Prompt, load_prompts
from bench.report import make_rows, print_table, write_json
from launcher.models import ModelPair, choose_models
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import StopRequest, stop_on_signals
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings

_CHECK_TOKENS = 32
_MAX_SHOWN = 10
_FILE_WIDTH = 160
ONE_PROCESS = "-1p"
"""Suffix of modes measured in a single process."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of `dspark bench serve`."""

    prompts: tuple[Path, ...]
    concurrencies: tuple[int, ...]
    modes: tuple[str, ...]
    limit: int
    max_tokens: int
    temperature: float
    seed: int | None
    json_out: Path | None
    peer: str | None
    in_process: bool

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
    require_full_groups(prompts, options.concurrencies)
    common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
    pair = choose_models(model, drafter, common, settings)
    if pair.drafter is None and set(options.modes) != {"off"}:
        raise ConfigurationError(f"{pair.note}: only --modes off can be measured", field="--modes")
    peer = TransformersPeer(pair.target) if options.peer else None
    with stop_on_signals() as stop, _engines(options, pair, common, settings, stop) as engines:
        results = _run_all(options, engines, prompts, peer, stop, console)
        checked = results if options.is_reproducible else _check_run(engines, prompts, stop)
    if stop.count:
        raise ConfigurationError("interrupted: nothing is reported")
    check = _check(checked, prompts, engines[0].mode, pair.target, console)
    if not check["passed"]:
        console.print("[bold red]outputs differ: no speed is reported[/bold red]")
        return False
    rows = make_rows(results, engines[0].mode)
    print_table(console, rows, engines[0].mode)
    if options.json_out:
        described = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
        described["prompts"] = [path.name for path in options.prompts]
        write_json(options.json_out, rows, {**described, "model": pair.served_name}, check)
    return True


def require_full_groups(prompts: Sequence[Prompt], concurrencies: Sequence[int]) -> None:
    """Prompts of one class run together: raises ConfigurationError if a class has fewer than are to run at once."""
    sizes = Counter(prompt.prompt_class for prompt in prompts)
    name, size = min(sizes.items(), key=lambda item: item[1])
    if size < max(concurrencies):
        raise ConfigurationError(
            f"{name} has {size} prompts, so {max(concurrencies)} of them never run at once: raise --limit to "
            f"{max(concurrencies)} (the file needs as many), or lower --concurrency to {size}",
            field="--concurrency",
        )


@contextlib.contextmanager
def _engines(
    options: BenchOptions, pair: ModelPair, common: CommonSettings, settings: LauncherSettings, stop: StopRequest
) -> Iterator[list[Engine]]:
    """One warm server per mode (and one more each in a single process, if asked for)."""
    variants = [(mode, one) for mode in options.modes for one in ((False, True) if options.in_process else (False,))]
    with contextlib.ExitStack() as stack:
        engines = []
        for mode, is_one_process in variants:
            serve = ServeOptions(
                port=free_port_pair(),
                verify_mode=mode,
                max_num_seqs=max(options.concurrencies),
                in_process=is_one_process,
                changes=(("DSPARK_SCHEDULER_PREFIX_CACHE", "off"),),  # repeats must cost what first runs do
            )
            server = stack.enter_context(running_server(serve, pair, common=common, settings=settings, stop=stop))
            if server is None:
                raise ConfigurationError("interrupted while the servers were starting")
            engine = Engine(f"{mode}{ONE_PROCESS}" if is_one_process else mode, server.url, server.run_dir)
            stack.callback(engine.close)
            engines.append(engine)
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
            groups = list(_groups(prompts, concurrency))
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
    order = [*(engine.mode for engine in engines), PEER]
    return sorted(results, key=lambda result: order.index(result.mode))  # stable: prompts keep their order


def _groups(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Prompts of one class at a time, `size` together."""
    for name in dict.fromkeys(prompt.prompt_class for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.prompt_class == name]
        for start in range(0, len(own), size):
            yield own[start : start + size]


def _check_run(engines: Sequence[Engine], prompts: Sequence[Prompt], stop: StopRequest) -> list[GroupResult]:
    """Short greedy answers of every mode, for the output check of runs that sample without a seed."""
    parameters = {"max_tokens": _CHECK_TOKENS, "temperature": 0.0, "return_token_ids": True}
    ordered = [group for group in _groups(prompts, 1) if not stop.count]
    return [engine.run_group(group, 1, parameters) for engine in engines for group in ordered]


def _check(
    results: Sequence[GroupResult], prompts: Sequence[Prompt], reference: str, model_dir: Path, console: Console
) -> dict[str, Any]:
    """Compares the modes' answers and says where they differ."""
    own = [result for result in results if result.mode != PEER]
    num_compared, divergences = find_divergences(own, prompts, reference)
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
