"""The `dspark` command. Commands import what they need when they run, so that `--help` is instant."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.cli_bench import app as bench_app
from launcher.cli_options import Drafter, Model, errors_in_words, integers, names

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help="A lossless LLM server.")
app.add_typer(bench_app, name="bench")


class VerifyMode(str, Enum):
    """Verify modes of the scheduler."""

    off = "off"
    static = "static"
    fixed = "fixed"
    threshold = "threshold"
    compact = "compact"
    cap_accept = "cap-accept"


Url = Annotated[str, typer.Option(help="Server to talk to.")]
ApiKey = Annotated[str | None, typer.Option(help="API key of the server. Default: DSPARK_LAUNCHER_API_KEY.")]


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
    with errors_in_words():
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
    with errors_in_words():
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
    with errors_in_words():
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
    with errors_in_words():
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
    with errors_in_words():
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
    with errors_in_words():
        from rich.console import Console

        from simulator.command import SimulateOptions, run_simulate
        from simulator.modes import MODES
        from simulator.sweep import SweepOptions
        from simulator.synthetic import TRAFFIC

        default = ",".join(name for name in MODES if name != "compact-no-guard")
        options = SimulateOptions(
            tables=table or ["gpu-like", "cpu"],
            modes=names(modes or default, MODES, "--modes"),
            traces=trace or (),
            traffic=names(traffic, TRAFFIC, "--traffic")[0],
            confidence_temperature=confidence_temperature,
            out=out,
            sweep=SweepOptions(
                concurrencies=integers(concurrency, "--concurrency"),
                num_rounds=rounds,
                num_seeds=seeds,
                noise=noise,
                drift=drift,
            ),
        )
        run_simulate(options, Console())


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


if __name__ == "__main__":
    app()
