"""Options of `dspark bench peers` (also `python -m bench.peers`)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.equality import find_divergences
from bench.peers import report
from bench.peers.catalog import PEERS, PeerSpec, WorkerOptions, choose, environments_of
from bench.peers.contestants import our_servers, running_peers
from bench.peers.install import ensure, is_installed, python_of
from bench.peers.prompts import Renderer, long_prompts, mixed_prompts
from bench.peers.run import Interrupted, Outcome, Plan, make_plan, num_prompts_of, run_plan
from bench.prompts import Prompt, load_prompts
from launcher.models import choose_models
from launcher.settings import LauncherSettings
from launcher.supervisor import stop_on_signals
from service_kit.cpu import available_cores
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings

_MAX_PROMPT_LEN = 512
"""Longest prompt of the speed groups, in tokens."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    prompts: Sequence[Path]
    peers: str | None
    modes: Sequence[str]
    concurrencies: Sequence[int]
    groups: int
    max_tokens: int
    long_tokens: int
    long_prompts: int
    install: bool
    dir: Path | None
    out: Path
    model: str | None
    drafter: str | None


def _numbers(text: str) -> list[int]:
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give positive numbers, e.g. 1,4,16")
    return list(dict.fromkeys(values))


def _modes(text: str) -> list[str]:
    values = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(values) <= {"off", "static", "compact"}:
        raise argparse.ArgumentTypeError(f"{text!r}: give some of off, static, compact")
    return values


def parse(arguments: Sequence[str]) -> Options:
    """Reads the command line; ends the process with a line on what is wrong with it."""
    parser = argparse.ArgumentParser(
        prog="dspark bench peers",
        description=f"Peers: {', '.join(PEERS)}.",
        epilog="Nothing is installed without --install.",
    )
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, help="JSON lines files or directories of them"
    )
    parser.add_argument("--peers", help="comma-separated; default: those that are installed")
    parser.add_argument(
        "--modes", type=_modes, default="off,compact", help="ours; ratios and equality refer to the first"
    )
    parser.add_argument("--concurrency", type=_numbers, default="1,4,16", dest="concurrencies")
    parser.add_argument("--groups", type=int, default=6, help="groups of prompts at each concurrency")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--long-tokens", type=int, default=1000, help="length of the prompts whose first token is timed"
    )
    parser.add_argument("--long-prompts", type=int, default=5, help="how many of them; 0: none")
    parser.add_argument("--install", action="store_true", help="install what the peers need, gigabytes for vLLM")
    parser.add_argument(
        "--dir", type=Path, help="environments and logs of peers; default: peers in the cache directory"
    )
    parser.add_argument("--out", type=Path, default=Path("peers"), help="directory of peers.json, peers.md, peers.png")
    parser.add_argument("--model")
    parser.add_argument("--drafter")
    options = Options(**vars(parser.parse_args(arguments)))
    if options.groups < 1 or options.max_tokens < 2 or options.long_prompts < 0:
        parser.error("--groups must be at least 1, --max-tokens at least 2, --long-prompts at least 0")
    return options


def run(options: Options, console: Console) -> bool:
    """Installs if asked, measures, checks, writes. False if our modes differ: no speed is reported then."""
    common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
    pair = choose_models(options.model, options.drafter, common, settings)
    if pair.drafter is None and set(options.modes) != {"off"}:
        raise ConfigurationError(f"{pair.note}: only --modes off can be measured", field="--modes")
    root = (options.dir or common.cache_dir / "peers").expanduser().resolve()
    gguf = next(iter(sorted(pair.target.glob("*.gguf"))), None)
    specs = choose(options.peers, root, has_gguf=gguf is not None, will_install=options.install)
    if options.install:
        for environment in environments_of(specs):
            console.print(f"environment {environment}")
            ensure(root, environment)
    plan = _plan(options, load_prompts(options.prompts, sys.maxsize), pair.target)
    concurrency = max(options.concurrencies)
    worker = WorkerOptions(pair.target, gguf, available_cores(), concurrency, _context(plan), root)
    failures: dict[str, str] = {}
    console.print(f"starting {', '.join([*options.modes, *(spec.name for spec in specs)])}")
    with (
        stop_on_signals() as stop,
        our_servers(options.modes, concurrency, pair, common, settings, stop) as ours,
        running_peers(specs, worker, failures) as peers,
    ):
        engines = [*ours, *peers]
        try:
            outcome = run_plan(plan, engines, _limits(specs), console.print, lambda: bool(stop.count))
        except Interrupted:
            raise ConfigurationError("interrupted: nothing is reported") from None
    outcome.failures.update(failures)
    check = _check(outcome, plan, options.modes)
    if not check["passed"]:
        console.print(f"{check['num_different']} answers of our modes differ: no speed is reported")
        return False
    described = {
        "model": pair.served_name,
        "modes": list(options.modes),
        "prompts": [path.name for path in options.prompts],
        "concurrencies": list(options.concurrencies),
        "num_groups": options.groups,
        "max_tokens": options.max_tokens,
    }
    facts = {engine.name: engine.facts for engine in engines}
    content = report.document(outcome, options.modes, facts, described, check)
    paths = report.write(options.out, content)
    console.print(report.markdown(content), markup=False, soft_wrap=True)
    if is_installed(root, "plot"):
        chart = options.out / "peers.png"
        script = Path(__file__).parent / "plot.py"
        subprocess.run([str(python_of(root / "plot")), str(script), str(paths[0]), str(chart)], check=True)
        paths.append(chart)
    console.print(f"written: {', '.join(map(str, paths))}", soft_wrap=True)
    return True


def _plan(options: Options, prompts: Sequence[Prompt], model_dir: Path) -> Plan:
    renderer = Renderer(model_dir)
    num = num_prompts_of(options.concurrencies, options.groups)
    mixed = mixed_prompts(prompts, renderer, num=num, max_len=_MAX_PROMPT_LEN)
    long = long_prompts(prompts, renderer, num=options.long_prompts, length=options.long_tokens)
    return make_plan(mixed, long, options.concurrencies, options.groups, options.max_tokens)


def _context(plan: Plan) -> int:
    """Tokens of the longest prompt with its answer, up to a multiple of 256."""
    longest = max(len(prompt.token_ids) for prompt in [*plan.long, *plan.warm_up])
    return -(-(max(longest, _MAX_PROMPT_LEN) + plan.max_tokens) // 256) * 256


def _limits(specs: Sequence[PeerSpec]) -> dict[str, int]:
    return {spec.name: spec.max_concurrency for spec in specs if spec.max_concurrency is not None}


def _check(outcome: Outcome, plan: Plan, modes: Sequence[str]) -> dict[str, Any]:
    """Whether our modes gave the same tokens for the same prompts."""
    compared = different = 0
    for size in plan.groups:
        own = [result for result in outcome.results if result.concurrency == size and result.mode in modes]
        num_compared, divergences = find_divergences(own, modes[0])
        compared, different = compared + num_compared, different + len(divergences)
    return {"passed": not different, "num_compared": compared, "num_different": different, "reference": modes[0]}


def main() -> None:
    """Exit code 1 if nothing could be reported."""
    if not run(parse(sys.argv[1:]), Console()):
        sys.exit(1)


if __name__ == "__main__":
    main()
