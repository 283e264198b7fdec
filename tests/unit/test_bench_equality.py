"""The exactness matrix: what it varies, what its rows must have shown, and that it finds differences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tiny_target import DRAFTER, TARGET

from bench import equality_run
from bench.equality_matrix import FACTORS, REFERENCE, ServerSettings, choose, few_pages, missing_evidence
from bench.equality_prompts import MAX_PROMPTS, short_prompts
from bench.equality_record import Record, Row, has_passed
from bench.equality_run import EqualityOptions, run_equality
from bench.equality_table import print_rows
from bench.measure import COUNTERS, GroupResult
from launcher.client import Answer
from launcher.models import ModelPair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.supervisor import StopRequest
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings

PAIR = ModelPair(TARGET, "tiny", DRAFTER, "")
NUM_PROMPTS, NUM_TOKENS, LONG = 5, 8, 700


class FakeServers:
    """Servers whose answers depend on the prompt alone, unless `change` spoils them."""

    def __init__(self) -> None:
        self.started: list[ServeOptions] = []
        self.change: Callable[[ServeOptions, int, list[int]], list[int]] = lambda options, concurrency, ids: ids
        self.without: str | None = None
        """A counter that stays 0."""
        self.num_leaked = 0
        self.stop_after: tuple[int, StopRequest] | None = None

    @contextlib.contextmanager
    def running_server(self, options: ServeOptions, pair: ModelPair, **_: Any) -> Iterator[Any]:
        self.started.append(options)
        if self.stop_after and len(self.started) > self.stop_after[0]:
            self.stop_after[1].request()
        yield SimpleNamespace(url="", run_dir=Path())

    def engine(self, mode: str, url: str, run_dir: Path) -> FakeEngine:
        return FakeEngine(self, self.started[-1])


class FakeEngine:
    def __init__(self, servers: FakeServers, options: ServeOptions) -> None:
        self._servers, self._options = servers, options

    def run_group(
        self, prompts: Sequence[Any], concurrency: int, parameters: Any, on_answer: Callable[[], None] = lambda: None
    ) -> GroupResult:
        answers = []
        for prompt in prompts:
            seed = sum(prompt.text.encode()) + parameters.get("seed", 0)
            ids = [(seed + i) % 97 for i in range(parameters["max_tokens"])]
            ids = self._servers.change(self._options, concurrency, ids)
            num_prompt_tokens = LONG if prompt.prompt_class == "long" else 40
            answers.append(Answer(0.0, token_ids=ids, num_tokens=len(ids), num_prompt_tokens=num_prompt_tokens))
            on_answer()
        drafts = int(self._options.verify_mode != "off")
        counters = dict.fromkeys(COUNTERS, 1) | {
            "num_drafted": drafts,
            "num_accepted": drafts,
            "num_preemptions": int(self._options.kv_memory is not None),
            "num_steps": -(-LONG // (self._options.max_batch_tokens or 256)),
        }
        if self._servers.without:
            counters[self._servers.without] = 0
        return GroupResult("", "", concurrency, tuple(answers), 1.0, counters)

    def load(self) -> Any:
        num_free_pages = 9 - self._servers.num_leaked
        return SimpleNamespace(num_slots=2, num_free_slots=2, num_pages=9, num_free_pages=num_free_pages)

    def close(self) -> None:
        pass


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    servers = FakeServers()
    monkeypatch.setattr(equality_run, "running_server", servers.running_server)
    monkeypatch.setattr(equality_run, "Engine", servers.engine)
    monkeypatch.setattr(equality_run, "logit_margins", lambda model_dir, divergences: [None] * len(divergences))
    return servers


def run(
    *factors: str, json_out: Path | None = None, stop: StopRequest | None = None, pair: ModelPair = PAIR, **changes: Any
) -> list[Row]:
    fields: dict[str, Any] = {
        "weight_formats": ("float32",),
        "samplings": ("greedy", "seeded"),
        "variations": tuple(choose(factors)),
        "num_prompts": NUM_PROMPTS,
        "max_tokens": NUM_TOKENS,
        "json_out": json_out,
        **changes,
    }
    common, console = CommonSettings(), Console(quiet=True)
    return run_equality(EqualityOptions(**fields), pair, common, LauncherSettings(), stop or StopRequest(), console)


def test_equal_answers_pass_in_every_row(servers: FakeServers) -> None:
    rows = run()
    assert has_passed(rows)
    assert len({row.key for row in rows}) == 2 * len(choose(()))
    assert {row.factor for row in rows} == {REFERENCE.factor, *FACTORS}
    assert len(servers.started) == len({each.server for each in choose(())}), "a server started twice"
    assert all(("DSPARK_VERIFIER_WEIGHT_FORMAT", "float32") in options.changes for options in servers.started)


@pytest.mark.parametrize("position", [0, NUM_TOKENS - 1])
def test_one_other_token_is_found_and_told(servers: FakeServers, position: int) -> None:
    def change(options: ServeOptions, concurrency: int, ids: list[int]) -> list[int]:
        return [*ids[:position], 99, *ids[position + 1 :]] if concurrency == 1 and len(ids) > 1 else ids

    servers.change = change
    rows = run("concurrency")
    assert not has_passed(rows)
    assert [row.key[1:] for row in rows if row.num_different] == [
        ("greedy", "concurrency", "1"),
        ("seeded", "concurrency", "1"),
    ]
    fault = next(row.fault for row in rows if row.fault)
    assert fault.startswith(f"first difference, long: token {position} is 99, expected ")
    with (console := Console(width=200)).capture() as capture:
        print_rows(console, rows, "title")
    assert fault in capture.get()
    assert f"{2 * (NUM_PROMPTS + 1)} of {6 * (NUM_PROMPTS + 1)} answers differ: failed" in capture.get()


def test_an_answer_cut_short_everywhere_is_found(servers: FakeServers) -> None:
    servers.change = lambda options, concurrency, ids: ids[:-1]
    assert {row.fault for row in run("concurrency")} == {f"an answer has not {NUM_TOKENS} tokens"}


@pytest.mark.parametrize(
    ("counter", "factor", "words"),
    [
        ("num_preemptions", "preemption", "no preemption happened"),
        ("num_accepted", "mode", "no draft was accepted"),
        ("num_steps", "chunk", f"{LONG} tokens took 0 steps: chunks were not of 16 tokens"),
    ],
)
def test_a_factor_that_did_not_vary_fails_its_row(counter: str, factor: str, words: str, servers: FakeServers) -> None:
    servers.without = counter
    rows = run(factor)
    assert words in next(row.fault for row in rows if row.factor == factor)
    assert not any(row.fault for row in rows if row.factor == REFERENCE.factor)


def test_pages_that_stay_taken_fail_the_row(servers: FakeServers) -> None:
    servers.num_leaked = 1
    assert {row.fault for row in run("concurrency")} == {"slots or pages were not given back"}


def test_drafts_in_off_mode_are_a_fault() -> None:
    counters = dict.fromkeys(COUNTERS, 1)
    assert missing_evidence(REFERENCE, counters) == "drafts were made"


def test_an_interrupted_run_goes_on_where_it_stopped(servers: FakeServers, tmp_path: Path) -> None:
    stop = StopRequest()
    servers.stop_after = (1, stop)
    with pytest.raises(ConfigurationError, match=r"interrupted after 2 rows \(the same command"):
        run("mode", json_out=tmp_path / "x.json", stop=stop)
    servers.stop_after = None
    rows = run("mode", json_out=tmp_path / "x.json")
    assert [row.factor for row in rows] == ["reference", "reference", "mode", "mode", "mode", "mode"]
    assert [options.verify_mode for options in servers.started] == ["off", "static", "static", "compact"]
    assert run("mode", json_out=tmp_path / "x.json") == rows
    assert len(servers.started) == 4, "finished rows ran again"
    assert len(run("concurrency", json_out=tmp_path / "x.json")) == 8


def test_rows_of_another_state_are_not_continued(servers: FakeServers, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    run("concurrency", json_out=path)
    with pytest.raises(ConfigurationError, match=r"another state \(max_tokens changed\): remove it"):
        run("concurrency", json_out=path, max_tokens=NUM_TOKENS + 1)
    path.write_text('{"rows": []}')
    with pytest.raises(ConfigurationError, match="no record of this command"):
        Record(path, {})


def test_sources_that_change_meanwhile_end_the_run(servers: FakeServers, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["a", "a", "b"])
    monkeypatch.setattr(equality_run, "sources_digest", lambda: next(digests))
    with pytest.raises(ConfigurationError, match="the sources changed"):
        run("mode")


def test_without_a_drafter_only_off_is_compared(servers: FakeServers) -> None:
    pair = PAIR._replace(drafter=None, note="speculation off")
    assert has_passed(run("concurrency", "chunk", "preemption", pair=pair))
    with pytest.raises(
        ConfigurationError,
        match=r"no drafter, --only concurrency --only chunk --only preemption --only chaining --only process$",
    ):
        run("mode", pair=pair)


def test_few_pages_hold_each_request_but_not_all() -> None:
    tokens = [40] * MAX_PROMPTS
    pages = few_pages(tokens, 128, 16)
    assert 16 * 3 <= pages < 16 * 11
    assert few_pages([500], 128, 16) == 40  # the longest alone
    assert few_pages([40, 40], 32, 16) == 16  # one a slot


def test_prompts_are_all_different_and_every_task_comes_early() -> None:
    prompts = short_prompts(MAX_PROMPTS)
    assert len(set(prompts)) == MAX_PROMPTS
    assert len({prompt.prompt_class for prompt in prompts[:6]}) == 6


def test_the_reference_comes_first_and_plain() -> None:
    assert choose(("chunk",))[0] is REFERENCE
    assert REFERENCE.server == ServerSettings()
    assert [each.value for each in choose(("chunk",))[1:]] == ["16", "64", "512"]
