"""The `dspark` command. Commands import what they need when they run, so that `--help` is instant."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help="A lossless LLM server.")
bench_app = typer.Typer(no_args_is_help=True, help="Measurements.")
app.add_typer(bench_app, name="bench")


class VerifyMode(str, Enum):
    """Verify modes of the scheduler."""

    off = "off"
    static = "static"
    fixed = "fixed"
    threshold = "threshold"
    compact = "compact"
    cap_accept = "cap-accept"


class Peer(str, Enum):
    """Engines to compare with."""

    transformers = "transformers"


Model = Annotated[str | None, typer.Option(help="Target: directory or hub id. Default: the embedded one.")]
Drafter = Annotated[str | None, typer.Option(help='Drafter: directory, hub id or "none".')]
Url = Annotated[str, typer.Option(help="Server to talk to.")]
ApiKey = Annotated[str | None, typer.Option(help="API key of the server. Default: DSPARK_LAUNCHER_API_KEY.")]


@contextlib.contextmanager
def _errors_in_words() -> Iterator[None]:
    """Expected errors become one line and exit code 1; anything else keeps its traceback."""
    from launcher.client import ServerError
    from launcher.supervisor import ServiceDiedError
    from service_kit.errors import ServiceError

    try:
        yield
    except (ServiceError, ServerError, ServiceDiedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def serve(
    model: Model = None,
    drafter: Drafter = None,
    host: Annotated[str, typer.Option(help="Address of the REST API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65534, help="Port of the REST API; text gRPC takes the next.")] = 8000,
    verify_mode: Annotated[VerifyMode | None, typer.Option(help="Default: compact.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Most choices running at once.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest context, in tokens.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="Most token rows in a step.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help='K/V pages of target and drafter, e.g. "1GiB".')] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="One process instead of four.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="File with one API key a line.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="console|otlp|FILE", help="Export OpenTelemetry spans; or what came of every step, as JSON lines."
        ),
    ] = None,
) -> None:
    """Serve a model until Ctrl-C."""
    with _errors_in_words():
        from launcher.models import choose_models
        from launcher.serve import run_serve
        from launcher.services import ServeOptions
        from launcher.settings import LauncherSettings
        from service_kit.settings import CommonSettings, load_settings

        exporter, trace_file = _trace(trace)
        options = ServeOptions(
            host=host,
            port=port,
            verify_mode=verify_mode and verify_mode.value,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            kv_memory=kv_memory,
            api_key_file=api_key_file and api_key_file.expanduser().resolve(),
            trace=exporter,
            trace_file=trace_file,
            in_process=in_process,
        )
        common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
        pair = choose_models(model, drafter, common, settings)
        run_serve(options, pair, common, settings)


@app.command()
def chat(
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System turn.")] = None,
    colour: Annotated[bool, typer.Option("--colour", "--color", help="Colour accepted drafts.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same text.")] = None,
) -> None:
    """Chat with a running server in the terminal."""
    with _errors_in_words():
        from launcher.chat import run_chat
        from launcher.settings import LauncherSettings
        from service_kit.settings import load_settings

        settings = load_settings(LauncherSettings)
        key = api_key or (settings.api_key.get_secret_value() if settings.api_key else None)
        given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        parameters = {key: value for key, value in given.items() if value is not None}
        run_chat(url, key, prompt=prompt, system=system, colour=colour, parameters=parameters)


@app.command()
def doctor(model: Model = None, drafter: Drafter = None) -> None:
    """Check this machine and the checkpoints; says in words what is wrong. Exit code 1 if anything is."""
    with _errors_in_words():
        from launcher.doctor import run_doctor

        if not run_doctor(model, drafter):
            raise typer.Exit(1)


@app.command()
def profile(
    out: Annotated[Path, typer.Option(help="JSON file to write; a plot goes beside it.")] = Path("costs.json"),
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="As for serve.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="As for serve.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure as little as serve does at start.")] = False,
    model: Model = None,
    drafter: Drafter = None,
) -> None:
    """Measure what steps cost on this machine: a minute or two, for the scheduler's decisions."""
    with _errors_in_words():
        from launcher.models import choose_models
        from launcher.profile import ProfileOptions, run_profile
        from launcher.settings import LauncherSettings
        from service_kit.settings import CommonSettings, load_settings

        common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
        pair = choose_models(model, drafter, common, settings)
        run_profile(ProfileOptions(out, max_num_seqs, max_batch_tokens, quick), pair, common, settings)


@app.command()
def calibrate(
    prompts: Annotated[list[Path], typer.Option(help="JSON lines file (turns or prompt), or a directory of them.")],
    held_out: Annotated[
        list[Path] | None, typer.Option(help="Prompts that judge the result. Default: half of the others.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts taken from each file.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of sampled answers.")] = 1.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at once.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Default: calibration.json beside the drafter.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write. Default: beside the file.")] = None,
    model: Model = None,
    drafter: Drafter = None,
) -> None:
    """Fit a drafter's confidences to what is accepted: answers the prompts greedily, seeded and sampled."""
    with _errors_in_words():
        from launcher.calibrate import CalibrateOptions, run_calibrate
        from launcher.models import choose_models
        from launcher.settings import LauncherSettings
        from service_kit.settings import CommonSettings, load_settings

        options = CalibrateOptions(
            prompts,
            held_out or (),
            limit,
            max_tokens,
            temperature,
            concurrency,
            out and out.expanduser().resolve(),
            plot,
        )
        common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
        pair = choose_models(model, drafter, common, settings)
        run_calibrate(options, pair, common, settings)


@app.command()
def simulate(
    table: Annotated[
        list[str] | None, typer.Option(help="Costs: a file of dspark profile, cpu or gpu-like. Default: those two.")
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Trace of serve --trace, recorded with --verify-mode static; repeatable.")
    ] = None,
    traffic: Annotated[str, typer.Option(help="Made-up requests, without a trace: published, embedded.")] = "published",
    modes: Annotated[str | None, typer.Option(help="Comma-separated. Default: all but compact-no-guard.")] = None,
    concurrency: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8,16,32,64,128,256,512,1000",
    rounds: Annotated[int, typer.Option(min=1, help="Row steps of each run; it takes 150 to 2000 steps.")] = 20_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each point.")] = 3,
    noise: Annotated[float, typer.Option(min=0, max=1, help="Of a step's time, as a share; not with a trace.")] = 0.05,
    drift: Annotated[float, typer.Option(min=0, max=1, help="Slow swing of the machine's speed, as a share.")] = 0.0,
    confidence_temperature: Annotated[
        float, typer.Option(min=0.05, help="Made-up confidences: below 1 too sure, above 1 not sure enough.")
    ] = 1.0,
    out: Annotated[Path, typer.Option(help="Directory of the CSV, JSON and PNG files.")] = Path("simulated"),
) -> None:
    """Replay recorded or made-up traffic through the scheduler's own decisions, under any table of step costs."""
    with _errors_in_words():
        from rich.console import Console

        from simulator.command import SimulateOptions, run_simulate
        from simulator.modes import MODES
        from simulator.sweep import SweepOptions
        from simulator.synthetic import TRAFFIC

        default = ",".join(name for name in MODES if name != "compact-no-guard")
        options = SimulateOptions(
            tables=table or ["gpu-like", "cpu"],
            modes=_names(modes or default, MODES, "--modes"),
            traces=trace or (),
            traffic=_names(traffic, TRAFFIC, "--traffic")[0],
            confidence_temperature=confidence_temperature,
            out=out,
            sweep=SweepOptions(
                concurrencies=_integers(concurrency, "--concurrency"),
                num_rounds=rounds,
                num_seeds=seeds,
                noise=noise,
                drift=drift,
            ),
        )
        run_simulate(options, Console())


@bench_app.command("serve")
def bench_serve(
    prompts: Annotated[list[Path], typer.Option(help="JSON lines file (turns or prompt), or a directory of them.")],
    concurrency: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8",
    modes: Annotated[
        str,
        typer.Option(
            help="Comma-separated: off, static, fixed:2, threshold:0.5, compact and cap-accept (with :causal, "
            ":lagged, :fixed-blocks, :no-guard). Any of them with :again: a second server of it, for the noise. Ratios "
            "are to the first."
        ),
    ] = "off,static,compact",
    limit: Annotated[int, typer.Option(min=1, help="Prompts taken from each file.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="With a temperature: coupled sampling.")] = None,
    repeats: Annotated[
        str | None,
        typer.Option(help="Groups at each concurrency, prompts used again: one number, or one for each concurrency."),
    ] = None,
    mix: Annotated[bool, typer.Option("--mix", help="Prompts of all files run together.")] = False,
    kv_memory: Annotated[str | None, typer.Option(help='K/V pages of each server, e.g. "1GiB".')] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most token rows in a step. Default: 8 for each request, at least 256.")
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    csv_out: Annotated[Path | None, typer.Option("--csv", help="Write the rows here as a table.")] = None,
    png_out: Annotated[Path | None, typer.Option("--png", help="Draw the rows here.")] = None,
    peer: Annotated[Peer | None, typer.Option(help="Also measure another engine on the same prompts.")] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="Each server in one process.")] = False,
    model: Model = None,
    drafter: Drafter = None,
) -> None:
    """Speed of the verify modes side by side, after checking that they give the same greedy text."""
    with _errors_in_words():
        from bench.modes import parse_modes
        from bench.serve import BenchOptions, run_bench

        options = BenchOptions(
            prompts=tuple(prompts),
            concurrencies=tuple(_integers(concurrency, "--concurrency")),
            modes=_option(parse_modes, modes, "--modes"),
            limit=limit,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            repeats=tuple(_integers(repeats, "--repeats")) if repeats else (),
            is_mixed=mix,
            kv_memory=kv_memory,
            max_batch_tokens=max_batch_tokens,
            json_out=json_out,
            csv_out=csv_out,
            png_out=png_out,
            peer=peer and peer.value,
            in_process=in_process,
        )
        if not run_bench(options, model, drafter):
            raise typer.Exit(1)


@bench_app.command("equality")
def bench_equality(
    formats: Annotated[str, typer.Option(help="Comma-separated weight formats: q4, fp16, float32.")] = "q4,fp16",
    samplings: Annotated[str, typer.Option(help="Comma-separated: greedy, seeded, nucleus.")] = "greedy,seeded",
    prompts: Annotated[int, typer.Option(min=1, max=48, help="Short prompts; a long one comes on top.")] = 48,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    only: Annotated[list[str] | None, typer.Option(metavar="FACTOR", help="Vary only this (repeatable).")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write rows here after each; a later run goes on from them.")
    ] = None,
    model: Model = None,
    drafter: Drafter = None,
) -> None:
    """Same tokens in every mode, concurrency, chunk size and after preemption: each alone against one reference run.

    Exit code 1 if any answer differs, or if what a row varies did not happen.
    """
    with _errors_in_words():
        from rich.console import Console

        from bench import equality_matrix as matrix
        from bench.equality_record import has_passed, machine_features
        from bench.equality_run import EqualityOptions, run_equality
        from bench.equality_table import print_rows
        from launcher.models import choose_models
        from launcher.settings import LauncherSettings
        from launcher.supervisor import stop_on_signals
        from service_kit.cpu import available_cores, cpu_name
        from service_kit.settings import CommonSettings, load_settings

        options = EqualityOptions(
            weight_formats=tuple(_names(formats, matrix.WEIGHT_FORMATS, "--formats")),
            samplings=tuple(_names(samplings, matrix.SAMPLINGS, "--samplings")),
            variations=tuple(matrix.choose(_names(",".join(only), matrix.FACTORS, "--only") if only else ())),
            num_prompts=prompts,
            max_tokens=tokens,
            json_out=json_out,
        )
        console = Console()
        common, settings = load_settings(CommonSettings), load_settings(LauncherSettings)
        pair = choose_models(model, drafter, common, settings)
        with stop_on_signals() as stop:
            rows = run_equality(options, pair, common, settings, stop, console)
        machine = f"{cpu_name()} ({', '.join(machine_features())}), {available_cores()} cores"
        print_rows(console, rows, f"{pair.served_name} on {machine}")
        if not has_passed(rows):
            raise typer.Exit(1)


@bench_app.command(
    "kernels", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_kernels(context: typer.Context) -> None:
    """Where a forward of the target spends its time, kernel by kernel; options go to bench/kernels.py."""
    with _errors_in_words():
        from bench.kernels import main

        main(context.args)


@bench_app.command(
    "roofline", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_roofline(context: typer.Context) -> None:
    """Every phase of a step beside the machine's memory and arithmetic at best; options go to bench/roofline.py."""
    with _errors_in_words():
        from bench.roofline import main

        main(context.args)


@bench_app.command(
    "timeline", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_timeline(context: typer.Context) -> None:
    """Plots consecutive steps of a trace and the gaps between forwards; options go to bench/timeline.py."""
    with _errors_in_words():
        from bench.timeline import main

        main(context.args)


@bench_app.command(
    "scheduler", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_scheduler(context: typer.Context) -> None:
    """What a step costs outside the executors, over executors that answer at once; options go to bench/scheduler.py."""
    with _errors_in_words():
        from bench.scheduler import main

        main(context.args)


@bench_app.command(
    "peers", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_peers(context: typer.Context) -> None:
    """Speed beside other engines on the same model and prompts; options go to bench/peers."""
    with _errors_in_words():
        from bench.peers.__main__ import main

        sys.argv = ["bench.peers", *context.args]
        main()


def _trace(value: str | None) -> tuple[str | None, Path | None]:
    """Exporter of spans, or the file that gets a line for every step."""
    if value in (None, "console", "otlp"):
        return value, None
    assert value is not None
    if not set("./\\") & set(value):  # a slip of the pen must not become a file
        raise typer.BadParameter(
            f"{value!r} is none of console, otlp and a file, e.g. ./{value}.jsonl", param_hint="--trace"
        )
    return None, Path(value).expanduser().resolve()


def _integers(text: str, option: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r}: give positive numbers, e.g. 1,8", param_hint=option)
    return values


def _option(parse: Callable[[str], T], text: str, option: str) -> T:
    """What `parse` makes of an option; its ConfigurationError becomes a usage error."""
    from service_kit.errors import ConfigurationError

    try:
        return parse(text)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _names(text: str, known: Collection[str], option: str) -> list[str]:
    values = [part.strip() for part in text.split(",")]
    if unknown := [value for value in values if value not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint=option)
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    app()
