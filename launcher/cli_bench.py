"""The `dspark bench` commands."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli_options import Drafter, Model, errors_in_words, integers, names, parsed

app = typer.Typer(no_args_is_help=True, help="Measurements.")


class Peer(str, Enum):
    """Engines to compare with."""

    transformers = "transformers"


@app.command("serve")
def bench_serve(
    prompts: Annotated[list[Path], typer.Option(help="JSON lines file (turns or prompt), or a directory of them.")],
    concurrency: Annotated[str, typer.Option(help="Comma-separated.")] = "1,8",
    modes: Annotated[
        str,
        typer.Option(
            help="Comma-separated: off, static, fixed:2, threshold:0.5, compact and cap-accept (with :causal, "
            ":lagged, :fixed-blocks, :no-guard). With :undrafted: the same server, asked for no drafts. With :again: a "
            "second server, for the noise. Ratios are to the first."
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
    with errors_in_words():
        from bench.modes import parse_modes
        from bench.serve import BenchOptions, run_bench

        options = BenchOptions(
            prompts=tuple(prompts),
            concurrencies=tuple(integers(concurrency, "--concurrency")),
            modes=parsed(parse_modes, modes, "--modes"),
            limit=limit,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            repeats=tuple(integers(repeats, "--repeats")) if repeats else (),
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


@app.command("equality")
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
    with errors_in_words():
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
            weight_formats=tuple(names(formats, matrix.WEIGHT_FORMATS, "--formats")),
            samplings=tuple(names(samplings, matrix.SAMPLINGS, "--samplings")),
            variations=tuple(matrix.choose(names(",".join(only), matrix.FACTORS, "--only") if only else ())),
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


@app.command(
    "kernels", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_kernels(context: typer.Context) -> None:
    """Where a forward of the target spends its time, kernel by kernel; options go to bench/kernels.py."""
    with errors_in_words():
        from bench.kernels import main

        main(context.args)


@app.command(
    "roofline", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_roofline(context: typer.Context) -> None:
    """Every phase of a step beside the machine's memory and arithmetic at best; options go to bench/roofline.py."""
    with errors_in_words():
        from bench.roofline import main

        main(context.args)


@app.command(
    "timeline", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_timeline(context: typer.Context) -> None:
    """Plots consecutive steps of a trace and the gaps between forwards; options go to bench/timeline.py."""
    with errors_in_words():
        from bench.timeline import main

        main(context.args)


@app.command(
    "grammar", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_grammar(context: typer.Context) -> None:
    """Random JSON schemas on a running server: valid, and the same with speculation; options go to bench/grammar.py."""
    with errors_in_words():
        from bench.grammar import main

        main(context.args)


@app.command(
    "scheduler", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_scheduler(context: typer.Context) -> None:
    """What a step costs outside the executors, over executors that answer at once; options go to bench/scheduler.py."""
    with errors_in_words():
        from bench.scheduler import main

        main(context.args)


@app.command(
    "peers", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench_peers(context: typer.Context) -> None:
    """Speed beside other engines on the same model and prompts; options go to bench/peers."""
    with errors_in_words():
        from bench.peers.__main__ import main

        sys.argv = ["bench.peers", *context.args]
        main()
