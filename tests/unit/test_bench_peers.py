"""Peers of the benchmark: workers, the interleaved run, rows; peers themselves are never needed here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_target import TARGET

from bench.measure import GroupResult
from bench.peers import install
from bench.peers.__main__ import parse
from bench.peers.catalog import PEERS, WorkerOptions, choose, command_of
from bench.peers.engines import Clock, Transformers
from bench.peers.prompts import LONG, MIXED, Renderer, long_prompts, mixed_prompts
from bench.peers.report import document, first_token_rows, markdown, speed_rows, write
from bench.peers.run import Interrupted, Outcome, make_plan, num_prompts_of, run_plan
from bench.peers.worker import PeerError, PeerPrompt, Worker
from bench.prompts import Prompt
from launcher.client import Answer
from service_kit.errors import ConfigurationError

FAKE = """
import json, sys
print("a library's own line")
print(json.dumps({"ready": {"dtype": "none"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    n = request["max_tokens"]
    if n == 13:
        print(json.dumps({"error": "unlucky"}), flush=True)
    elif n == 14:
        sys.exit("gone")
    elif n != 15:
        answers = [{"token_ids": [len(ids)] * min(n, 10), "first_s": 0.5, "last_s": 2.0} for ids in request["prompts"]]
        print(json.dumps({"answers": answers}), flush=True)
"""
PROMPTS = [PeerPrompt(MIXED, "one", (1, 2)), PeerPrompt(MIXED, "two", (1, 2, 3))]


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    fake = Worker("fake", [sys.executable, "-c", FAKE], tmp_path / "fake.log", start_s=30, answer_s=30)
    yield fake
    fake.close()


def _state(worker: Worker) -> str:
    """The kernel's letter for the state of the worker's process."""
    return Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_answers_and_is_stopped_between_its_turns(worker: Worker) -> None:
    assert worker.facts == {"dtype": "none"}
    result = worker.run_group(PROMPTS, 2, 4)
    assert [answer.token_ids for answer in result.answers] == [[2] * 4, [3] * 4]
    assert (result.mode, result.prompt_class, result.concurrency, result.wall_s) == ("fake", MIXED, 2, 2.0)
    assert result.tokens_per_second == 4.0
    assert result.answers[0].ttft_ms == 500.0
    deadline = time.monotonic() + 10
    while _state(worker) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _state(worker) == "T"
    assert worker.run_group(PROMPTS[:1], 1, 2).answers[0].token_ids == [2, 2]


@pytest.mark.parametrize(
    ("num", "words"), [(13, "unlucky"), (14, "has ended: see .*fake.log"), (11, "10 tokens, not 11")]
)
def test_what_goes_wrong_in_a_worker_is_said(worker: Worker, num: int, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        worker.run_group(PROMPTS, 2, num)


def test_a_worker_that_is_silent_or_does_not_start_is_given_up(tmp_path: Path) -> None:
    silent = Worker("silent", [sys.executable, "-c", FAKE], tmp_path / "log", start_s=30, answer_s=0.2)
    with pytest.raises(PeerError, match=r"no answer within 0 s"):
        silent.run_group(PROMPTS, 2, 15)
    silent.close()
    with pytest.raises(PeerError, match="broken has ended"):
        Worker("broken", [sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "log", start_s=30, answer_s=1)


def test_a_padded_batch_and_prompt_lookup_give_the_tokens_of_a_prompt_alone() -> None:
    fields = {"model": str(TARGET), "dtype": "float32", "threads": 1}
    plain, lookup = (Transformers({**fields, "lookup": is_lookup}) for is_lookup in (False, True))

    def answers(engine: Transformers, prompts: list[list[int]]) -> list[list[int]]:
        clock = Clock(len(prompts))
        engine.complete(prompts, 6, clock)
        assert all(0 < answer["first_s"] <= answer["last_s"] for answer in clock.answers)
        return [answer["token_ids"] for answer in clock.answers]

    prompts = [[5, 6, 7], [9, 5, 6, 7, 5, 6]]
    alone = [answers(plain, [prompt])[0] for prompt in prompts]
    assert [len(token_ids) for token_ids in alone] == [6, 6]
    assert answers(plain, prompts) == alone
    assert answers(lookup, prompts[1:]) == alone[1:]


class FakeContestant:
    """Answers with a fixed speed and records its turns."""

    facts: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, name: str, seconds: float, turns: list[str], fails_at: int = 0) -> None:
        self.name, self._seconds, self._turns, self._fails_at = name, seconds, turns, fails_at

    def run_group(self, prompts: Sequence[PeerPrompt], concurrency: int, max_tokens: int) -> GroupResult:
        self._turns.append(f"{self.name}{concurrency}")
        if concurrency == self._fails_at and max_tokens > 4:
            raise PeerError("too much")
        ids = [len(prompt.token_ids) for prompt in prompts]
        answers = tuple(
            Answer(0.0, token_ids=[each] * max_tokens, first_token=0.1, last_token=self._seconds, num_tokens=max_tokens)
            for each in ids
        )
        return GroupResult(self.name, prompts[0].prompt_class, concurrency, answers, self._seconds, {})

    def close(self) -> None: ...


def _run(engines: Sequence[FakeContestant], limits: dict[str, int], stop_after: int = 10**6) -> Outcome:
    num = num_prompts_of([1, 2], 2)
    prompts = [PeerPrompt(MIXED, str(index), (0,) * (index + 1)) for index in range(num)]
    plan = make_plan(prompts, [PeerPrompt(LONG, "long", (0,) * 50)], [1, 2], 2, 8)
    used = [*plan.warm_up, *(prompt for groups in plan.groups.values() for group in groups for prompt in group)]
    assert used == prompts
    heard: list[str] = []
    return run_plan(plan, engines, limits, heard.append, lambda: len(heard) > stop_after)


def test_every_group_goes_to_every_engine_in_turn() -> None:
    turns: list[str] = []
    outcome = _run([FakeContestant(name, 1.0, turns) for name in "ab"], {"b": 1})
    warm_up, long = ["a1", "b1", "a2"], ["a1", "b1"]
    assert turns == [*warm_up, "a1", "b1", "b1", "a1", "a2", "a2", *long]
    assert [(result.mode, result.concurrency) for result in outcome.results] == [
        *[("a", 1), ("a", 1), ("a", 2), ("a", 2)],
        *[("b", 1), ("b", 1)],
    ]
    assert outcome.failures == {}


def test_a_peer_that_fails_is_left_out_from_there_on() -> None:
    turns: list[str] = []
    outcome = _run([FakeContestant("a", 1.0, turns), FakeContestant("b", 1.0, turns, fails_at=2)], {})
    assert outcome.failures == {"b": "too much"}
    assert {(result.mode, result.concurrency) for result in outcome.results} == {("a", 1), ("a", 2), ("b", 1)}
    assert [result.mode for result in outcome.long] == ["a"]


def test_an_interrupted_run_reports_nothing() -> None:
    with pytest.raises(Interrupted):
        _run([FakeContestant("a", 1.0, [])], {}, stop_after=2)


def test_rows_pair_groups_with_ours(tmp_path: Path) -> None:
    turns: list[str] = []
    outcome = _run([FakeContestant("off", 1.0, turns), FakeContestant("x", 4.0, turns)], {})
    rows = {(row["engine"], row["concurrency"]): row for row in speed_rows(outcome.results, ["off"])}
    assert rows["x", 2]["tokens_per_second"] == 2 * 8 / 4.0
    assert (rows["off", 1]["off_ratio"], rows["x", 1]["off_ratio"]) == (1.0, 4.0)
    assert (rows["x", 2]["num_tokens"], rows["x", 2]["common_prefix"]) == (32, 8)
    (_, long) = first_token_rows(outcome.long, "off")
    assert (long["engine"], round(long["ttft_ms"]), long["ratio"]) == ("x", 100, 1.0)
    options = {"model": "m", "modes": ["off"], "max_tokens": 8, "num_groups": 2}
    facts = {"off": {}, "x": {"dtype": "int3", "versions": {"y": "9"}}}
    content = document(outcome, ["off"], facts, options, {"passed": True})
    assert "| 2 | x | 4.0 (4.0-4.0) | 4.00 |" in markdown(content)
    assert "int3" in markdown(content)
    json_path, _ = write(tmp_path / "new", content)
    assert json.loads(json_path.read_text())["rows"] == content["rows"]


def test_the_common_prefix_ends_at_the_first_difference() -> None:
    def result(mode: str, token_ids: list[int]) -> GroupResult:
        answer = Answer(0.0, token_ids=token_ids, first_token=0.1, last_token=1.0, num_tokens=4)
        return GroupResult(mode, MIXED, 1, (answer,), 1.0, {})

    rows = speed_rows([result("off", [1, 2, 3, 4]), result("x", [1, 2, 9, 4])], ["off"])
    assert [row["common_prefix"] for row in rows] == [4, 2]


class FakeRenderer(Renderer):
    """One token a word, two of the template."""

    def __init__(self) -> None: ...

    def render(self, text: str) -> tuple[int, ...]:
        return tuple(range(2 + len(text.split())))


def test_prompts_are_mixed_over_files_and_cut_to_length() -> None:
    prompts = [Prompt("a", "x y"), Prompt("a", "x " * 20), Prompt("a", "z"), Prompt("b", "u v w")]
    mixed = mixed_prompts(prompts, FakeRenderer(), num=3, max_len=10)
    assert [(each.text, len(each.token_ids)) for each in mixed] == [("x y", 4), ("u v w", 5), ("z", 3)]
    with pytest.raises(ConfigurationError, match="3 prompts of at most 10 tokens, 4 needed"):
        mixed_prompts(prompts, FakeRenderer(), num=4, max_len=10)
    long = long_prompts(prompts, FakeRenderer(), num=2, length=9)
    assert [len(each.token_ids) for each in long] == [9, 9]
    assert long[0].text != long[1].text
    assert long_prompts(prompts, FakeRenderer(), num=0, length=9) == []
    with pytest.raises(ConfigurationError, match="too few words for 99 tokens"):
        long_prompts(prompts, FakeRenderer(), num=1, length=99)


def test_peers_are_chosen_by_name_and_by_what_is_installed(tmp_path: Path) -> None:
    found = choose(None, tmp_path, has_gguf=True, will_install=False)
    assert [spec.name for spec in found] == ["transformers", "transformers-bf16", "transformers-lookup"]
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "installed.json").write_text("{}")
    assert [spec.name for spec in choose("llama.cpp", tmp_path, has_gguf=True, will_install=False)] == ["llama.cpp"]
    for names, words in (("nope", "no peer 'nope'"), ("vllm-bf16", "not installed: add --install")):
        with pytest.raises(ConfigurationError, match=words):
            choose(names, tmp_path, has_gguf=True, will_install=False)
    with pytest.raises(ConfigurationError, match="needs a GGUF file"):
        choose("llama.cpp", tmp_path, has_gguf=False, will_install=False)


def test_commands_carry_model_threads_and_limits(tmp_path: Path) -> None:
    options = WorkerOptions(tmp_path / "m", tmp_path / "m.gguf", 2, 16, 1280, tmp_path)
    fields = {name: json.loads(command_of(spec, options)[-1]) for name, spec in PEERS.items()}
    assert {(name, field["threads"], field["context"]) for name, field in fields.items()} == {
        (name, 2, 1280) for name in PEERS
    }
    assert fields["transformers-lookup"]["concurrency"] == 1
    assert fields["llama.cpp"]["model"].endswith("m.gguf")
    assert "VLLM_CPU_OMP_THREADS_BIND=0-1" in command_of(PEERS["vllm-bf16"], options)


def test_an_environment_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def fake_install(directory: Path) -> None:
        made.append(directory)
        directory.mkdir()

    monkeypatch.setitem(install.INSTALLERS, "vllm", fake_install)
    assert not install.is_installed(tmp_path, "vllm")
    install.ensure(tmp_path, "vllm")
    install.ensure(tmp_path, "vllm")
    assert made == [tmp_path / "vllm"]


@pytest.mark.parametrize(
    "arguments",
    [["--concurrency", "0"], ["--concurrency", "x"], ["--modes", "on"], ["--groups", "0"], ["--long-prompts", "-1"]],
)
def test_bad_options_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--prompts", "x", *arguments])
    assert arguments[0] in capsys.readouterr().err
