"""`dspark bench equality`: the same tokens whatever else varies, each factor alone against one reference run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.equality import differences, logit_margins
from bench.equality_matrix import (
    MAX_CONCURRENCY,
    REFERENCE,
    SAMPLINGS,
    ServerSettings,
    Variation,
    few_pages,
    missing_evidence,
    variations,
)
from bench.equality_prompts import long_prompt, short_prompts
from bench.equality_record import Answers, Record, Row, identity, sources_digest
from bench.measure import Engine, GroupResult
from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import StopRequest
from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings
from verifier_service.config import TargetConfig
from verifier_service.model import PAGE_SIZE


@dataclass(frozen=True)
class EqualityOptions:
    """Options of `dspark bench equality`."""

    weight_formats: tuple[str, ...]
    samplings: tuple[str, ...]
    variations: tuple[Variation, ...]
    num_prompts: int
    """Short prompts; the long one comes on top."""
    max_tokens: int
    json_out: Path | None


def run_equality(
    options: EqualityOptions,
    pair: ModelPair,
    common: CommonSettings,
    settings: LauncherSettings,
    stop: StopRequest,
    console: Console,
) -> list[Row]:
    """Runs what the record does not hold yet and returns all rows asked for; `equality_record.has_passed` judges them.

    Raises ConfigurationError (interrupted, or sources that change meanwhile, too), ServiceDiedError or ServerError.
    """
    if pair.drafter is None and any(each.server.verify_mode != "off" for each in options.variations):
        plain = dict.fromkeys(each.factor for each in variations() if each.server.verify_mode == "off")
        names = " ".join(f"--only {factor}" for factor in plain if factor != REFERENCE.factor)
        raise ConfigurationError(f"{pair.note}: vary what needs no drafter, {names}", field="--only")
    record = Record(options.json_out, identity(pair, options.num_prompts, options.max_tokens))
    matrix = _Matrix(options, pair, common, settings, stop, console, record)
    with matrix.progress:
        for weight_format in options.weight_formats:
            for server in dict.fromkeys(variation.server for variation in options.variations):
                matrix.run_server(weight_format, server)
    chosen = {
        (weight_format, sampling, variation.factor, variation.value)
        for weight_format in options.weight_formats
        for sampling in options.samplings
        for variation in options.variations
    }
    return [row for row in record.rows if row.key in chosen]


class _Matrix:
    """One run of the matrix."""

    def __init__(
        self,
        options: EqualityOptions,
        pair: ModelPair,
        common: CommonSettings,
        settings: LauncherSettings,
        stop: StopRequest,
        console: Console,
        record: Record,
    ) -> None:
        self._options, self._pair, self._common, self._settings = options, pair, common, settings
        self._stop, self._record, self._sources = stop, record, sources_digest()
        self._long, self._short = long_prompt(), short_prompts(options.num_prompts)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        num_rows = len(options.weight_formats) * len(options.samplings) * len(options.variations)
        self._all_rows = self.progress.add_task("rows", total=num_rows)
        self._row = self.progress.add_task("starting", total=None)

    def run_server(self, weight_format: str, server: ServerSettings) -> None:
        """Runs the missing rows of one server; starts it only if there are any."""
        rows = [
            (sampling, variation)
            for sampling in self._options.samplings
            for variation in self._options.variations
            if variation.server == server
        ]
        missing = [each for each in rows if self._record.row(weight_format, *each) is None]
        self.progress.advance(self._all_rows, len(rows) - len(missing))
        if not missing:
            return
        if sources_digest() != self._sources:
            raise ConfigurationError("the sources changed during the run: rows before and after do not compare")
        name = f"{weight_format}: {missing[0][1].factor} {missing[0][1].value}"
        self.progress.update(self._row, description=f"{name}: starting", total=None)
        with self._engine(weight_format, server) as engine:
            long_steps = None if server.has_few_pages else self._count_steps(engine)
            for sampling, variation in missing:
                self._run_row(engine, weight_format, sampling, variation, long_steps)
                self.progress.advance(self._all_rows)

    @contextlib.contextmanager
    def _engine(self, weight_format: str, server: ServerSettings) -> Iterator[Engine]:
        changes = (
            ("DSPARK_VERIFIER_WEIGHT_FORMAT", weight_format),
            ("DSPARK_SCHEDULER_PREFIX_CACHE", "isolated" if server.has_prefix_cache else "off"),
            ("DSPARK_SCHEDULER_GUARD", "false"),  # rows are about drafts, whether they pay or not
            *server.changes,
        )
        serve = ServeOptions(
            port=free_port_pair(),
            verify_mode=server.verify_mode,
            max_num_seqs=MAX_CONCURRENCY,
            max_batch_tokens=server.max_chunk,
            kv_memory=self._little_memory(weight_format, server) if server.has_few_pages else None,
            in_process=server.in_process,
            changes=changes,
        )
        with running_server(
            serve, self._pair, common=self._common, settings=self._settings, stop=self._stop
        ) as running:
            self._check_stop()
            assert running is not None
            engine = Engine(weight_format, running.url, running.run_dir)
            try:
                yield engine
            finally:
                engine.close()

    def _little_memory(self, weight_format: str, server: ServerSettings) -> str:
        """Bytes of K/V pages that the short prompts outgrow together."""
        reference = self._record.reference(weight_format, self._options.samplings[0])
        count = few_pages(reference.num_prompt_tokens[1:], self._options.max_tokens, PAGE_SIZE)
        return str(count * _page_bytes(self._pair, weight_format, has_drafter=server.verify_mode != "off"))

    def _count_steps(self, engine: Engine) -> int:
        """Steps in which the long prompt alone is computed."""
        result = engine.run_group([self._long], 1, {"max_tokens": 1, "temperature": 0.0})
        return result.counters["num_steps"]

    def _run_row(
        self, engine: Engine, weight_format: str, sampling: str, variation: Variation, long_steps: int | None
    ) -> None:
        prompts = self._short if variation.server.has_few_pages else [self._long, *self._short]
        words = f"{weight_format} {sampling}: {variation.factor} {variation.value}"
        self.progress.update(self._row, description=words, completed=0, total=len(prompts))
        result = engine.run_group(
            prompts,
            variation.concurrency,
            {
                **SAMPLINGS[sampling],
                "max_tokens": self._options.max_tokens,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            self._on_answer,
        )
        found = Answers(
            [answer.token_ids for answer in result.answers], [answer.num_prompt_tokens for answer in result.answers]
        )
        reference = found if variation is REFERENCE else self._record.reference(weight_format, sampling)
        expected = reference.token_ids[-len(prompts) :]
        divergences = differences(prompts, expected, found.token_ids, "first difference")
        faults = []
        if divergences:
            faults.append(divergences[0].describe(logit_margins(self._pair.target, divergences[:1])[0]))
        if any(len(own) != self._options.max_tokens for own in found.token_ids):
            faults.append(f"an answer has not {self._options.max_tokens} tokens")
        if missing := missing_evidence(variation, result.counters):
            faults.append(f"{missing}: nothing was tested")
        if not _is_idle(engine):
            faults.append("slots or pages were not given back")
        size, num_prompt_tokens = variation.server.max_chunk, reference.num_prompt_tokens[0]
        if size and long_steps is not None and long_steps != -(-num_prompt_tokens // size):
            faults.append(f"{num_prompt_tokens} tokens took {long_steps} steps: chunks were not of {size} tokens")
        row = _row(weight_format, sampling, variation, result, len(divergences), long_steps, "; ".join(faults))
        self._record.add(row, found if variation is REFERENCE else None)

    def _on_answer(self) -> None:
        self.progress.advance(self._row)
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stop.count:
            again = " (the same command goes on from there)" if self._options.json_out else ""
            raise ConfigurationError(f"interrupted after {len(self._record.rows)} rows{again}")


def _is_idle(engine: Engine) -> bool:
    """Whether every slot and page is free; the last ingest of an answer that ended may take a moment."""
    for _ in range(10):
        load = engine.load()
        if (load.num_free_slots, load.num_free_pages) == (load.num_slots, load.num_pages):
            return True
        time.sleep(0.02)
    return False


def _row(
    weight_format: str,
    sampling: str,
    variation: Variation,
    result: GroupResult,
    num_different: int,
    long_steps: int | None,
    fault: str,
) -> Row:
    counters = result.counters
    return Row(
        weight_format=weight_format,
        sampling=sampling,
        factor=variation.factor,
        value=variation.value,
        concurrency=variation.concurrency,
        num_answers=len(result.answers),
        num_tokens=sum(answer.num_tokens for answer in result.answers),
        num_different=num_different,
        num_preemptions=counters["num_preemptions"],
        mean_committed=counters["num_committed"] / max(1, counters["num_steps"]),
        mean_accepted=counters["num_accepted"] / counters["num_verify_rows"] if counters["num_drafted"] else None,
        longest_prompt_steps=long_steps,
        duration_s=result.wall_s,
        fault=fault,
    )


def _page_bytes(pair: ModelPair, weight_format: str, *, has_drafter: bool) -> int:
    """Bytes of one page of K/V, target in that format and drafter in its default one."""
    from drafter_service.config import parse_config
    from drafter_service.model import page_bytes as drafter_page_bytes
    from kernels.kv_pages import page_type
    from verifier_service.model import page_bytes

    size = page_bytes(TargetConfig.from_checkpoint(Checkpoint(str(pair.target))), page_type(weight_format, "auto"))
    if has_drafter and pair.drafter is not None:
        config = parse_config(json.loads((pair.drafter / "config.json").read_text()))
        size += drafter_page_bytes(config, page_type("auto", "auto"))
    return size
