"""Benchmark arithmetic: prompts, groups, equality of outputs, rows."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_target import TARGET, clone_with_tokenizer

from bench.comparison import judge
from bench.equality import find_divergences
from bench.measure import COUNTERS, GroupResult
from bench.modes import parse_modes
from bench.peer import TransformersPeer
from bench.prompts import ALL, Prompt, load_prompts, make_groups
from bench.report import print_tables, write_csv, write_json
from bench.serve import BenchOptions, require_full_groups
from bench.serve_plot import plot_rows
from bench.serve_rows import make_rows
from launcher.client import Answer
from service_kit.errors import ConfigurationError

PROMPTS = [Prompt("a", "one"), Prompt("a", "two"), Prompt("b", "three")]
STATISTICS = {
    "num_spec_steps": 10,
    "num_drafted_steps": 5,
    "num_draft_tokens": 25,
    "num_verified_tokens": 20,
    "num_accepted_draft_tokens": 5,
    "num_uncut_accepted_tokens": 5,
}


def _answer(token_ids: list[int], seconds: float, **statistics: int) -> Answer:
    return Answer(
        0.0,
        token_ids=token_ids,
        first_token=0.5,
        last_token=0.5 + seconds,
        num_tokens=len(token_ids),
        num_prompt_tokens=3,
        speculation={**STATISTICS, **statistics},
    )


def _result(mode: str, prompt: Prompt, token_ids: list[int], wall_s: float, concurrency: int = 1) -> GroupResult:
    counters = dict.fromkeys(COUNTERS, 0) | {
        "num_steps": 10,
        "num_drafted_steps": 5,
        "step_ns": 100_000_000,
        "num_decode_steps": 5,
        "num_decode_committed": 8,
        "decode_step_ns": 40_000_000,
        "decode_draft_call_ns": 10_000_000,
        "decode_step_call_ns": 25_000_000,
        "draft_call_ns": 30_000_000,
        "step_call_ns": 60_000_000,
        "drafter_model_ns": 25_000_000,
        "verifier_model_ns": 55_000_000,
        "predicted_gain_ns": 20_000_000,
        "measured_gain_ns": -10_000_000,
    }
    answers = (_answer(token_ids, 1.0),)
    return GroupResult(mode, prompt.prompt_class, concurrency, answers, wall_s, counters, (prompt,))


def test_prompts_come_from_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"turns": ["first", "ignored"]}\n{"prompt": "sec\u2028ond"}\n{"prompt": "third"}\n'
    )
    assert load_prompts([tmp_path], 2) == [Prompt("x", "first"), Prompt("x", "sec\u2028ond")]
    assert load_prompts([tmp_path / "x.jsonl"], 9)[-1].text == "third"


@pytest.mark.parametrize("line", ["{", '{"text": "no"}', '{"turns": []}', "3"])
def test_a_bad_prompt_line_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigurationError, match=r"x\.jsonl:2"):
        load_prompts([tmp_path], 9)


def test_equal_answers_have_no_divergence() -> None:
    results = [_result(mode, prompt, [1, 2, 3], 1.0) for mode in ("off", "static") for prompt in PROMPTS]
    assert find_divergences(results, "off") == (3, [])


def test_the_first_divergence_is_found_also_where_one_answer_ended() -> None:
    results = [_result("off", prompt, [1, 2, 3], 1.0) for prompt in PROMPTS]
    results += [
        _result("static", prompt, ids, 1.0) for prompt, ids in zip(PROMPTS, ([1, 9, 3], [1, 2], [1, 2, 3]), strict=True)
    ]
    num_compared, (first, second) = find_divergences(results, "off")
    assert num_compared == 3
    assert (first.prompt, first.position, first.common_ids, first.expected_id, first.found_id) == (
        PROMPTS[0],
        1,
        (1,),
        2,
        9,
    )
    assert (second.prompt, second.position, second.expected_id, second.found_id) == (PROMPTS[1], 2, 3, None)
    assert "logit margin 5.00e-04" in first.describe(5e-4)


def test_answers_are_compared_by_prompt_however_often_it_comes() -> None:
    results = [_result("off", PROMPTS[0], [1, 2], 1.0, 4), _result("off", PROMPTS[0], [1, 2], 1.0, 1)]
    results += [_result("off", PROMPTS[1], [7], 1.0, 4), _result("compact", PROMPTS[1], [8], 1.0, 4)]
    num_compared, (found,) = find_divergences(results, "off")
    assert (num_compared, found.run, found.expected_id, found.found_id) == (2, "compact at concurrency 4", 7, 8)


def test_rows_pair_each_group_with_the_baseline() -> None:
    results = [_result("off", prompt, [1] * 11, 2.0) for prompt in PROMPTS]
    results += [
        _result("static", prompt, [1] * 11, wall) for prompt, wall in zip(PROMPTS, (1.0, 2.0, 4.0), strict=True)
    ]
    rows = {(row["class"], row["mode"]): row for row in make_rows(results, "off")}
    assert set(rows) == {(name, mode) for name in ("a", "b", "all") for mode in ("off", "static")}
    static = rows["all", "static"]
    assert (static["speedup"], static["speedup_p25"], static["speedup_p75"]) == (1.0, 0.75, 1.5)
    assert rows["a", "static"]["speedup"] == 1.5
    assert static["tokens_per_second"] == 5.5
    assert (static["tpot_ms_p50"], static["user_tokens_per_second"], static["user_speedup"]) == (
        pytest.approx(100.0),
        pytest.approx(10.0),
        1.0,
    )
    assert (static["accepted_length"], static["verify_length"], static["drafted_length"]) == (1.5, 2.0, 2.5)
    assert (static["accepted_length_drafted"], static["verify_length_drafted"]) == (2.0, 4.0)
    assert static["acceptance_rate"] == 0.25
    assert (static["step_ms"], static["draft_ms"], static["verify_ms"], static["other_ms"]) == (8.0, 2.0, 5.0, 1.0)
    assert static["token_ms"] == pytest.approx(8 / 1.5)
    assert static["rows"] == pytest.approx(8 / 5 / 1.5)
    assert (static["decode_tokens_per_second"], static["decode_speedup"]) == (200.0, 1.0)
    assert static["outside_models_share"] == pytest.approx(0.2)
    assert (static["predicted_speedup"], static["ledger_speedup"]) == (1.2, 0.9)


def _mixed(mode: str, seconds: tuple[float, float], uncut: int = 5) -> GroupResult:
    """One group of two classes."""
    answers = tuple(_answer([1] * 11, each, num_uncut_accepted_tokens=uncut) for each in seconds)
    answers[1].speculation = {**STATISTICS, "num_accepted_draft_tokens": 0, "num_uncut_accepted_tokens": uncut}
    counters = dict.fromkeys(COUNTERS, 0) | {"num_steps": 10, "step_ns": 9, "step_call_ns": 9}
    return GroupResult(mode, ALL, 2, answers, 2.0, counters, (PROMPTS[0], PROMPTS[2]))


def test_classes_of_mixed_groups_come_from_their_answers() -> None:
    results = [
        _mixed("off", (1.0, 2.0)),
        _mixed("compact", (0.5, 2.0)),
        _mixed("cap-accept:no-guard", (1.0, 2.0), uncut=15),
    ]
    rows = {(row["class"], row["mode"]): row for row in make_rows(results, "off")}
    easy, hard, both = (rows[name, "compact"] for name in ("a", "b", "all"))
    assert (easy["user_speedup"], hard["user_speedup"]) == (2.0, 1.0)
    assert (easy["accepted_length"], hard["accepted_length"], both["accepted_length"]) == (1.5, 1.0, 1.25)
    assert "speedup" not in easy
    assert "step_ms" not in hard
    assert (both["speedup"], both["num_requests"]) == (1.0, 2)
    assert (easy["uncut_accepted_length"], easy["utilisation"]) == (4.0, 0.5)
    assert (easy["draft_utilisation"], hard["draft_utilisation"]) == (pytest.approx(1 / 3), 0.0)


def test_servers_that_never_draft_commit_a_token_a_step() -> None:
    result = _result("off", PROMPTS[0], [1] * 11, 2.0)
    result.answers[0].speculation = None
    (row,) = make_rows([result], "off")
    assert (row["accepted_length"], row["verify_length"], row["lever"]) == (1.0, 0.0, "drafts hardly or not")
    assert "acceptance_rate" not in row


def test_engines_without_counters_get_rows_too() -> None:
    results = [_result("off", PROMPTS[0], [1] * 11, 2.0)]
    results.append(replace(results[0], mode="transformers", counters={}, wall_s=4.0))
    peer = make_rows(results, "off")[-1]
    assert peer["speedup"] == 0.5
    assert "step_ms" not in peer
    with (console := Console(width=250)).capture() as capture:
        print_tables(console, make_rows(results, "off"), [], "off")
    header = next(line for line in capture.get().splitlines() if "tokens/s" in line and "┃" in line).split("┃")
    line = next(line for line in capture.get().splitlines() if "transformers" in line).split("│")
    shown = dict(zip((cell.strip() for cell in header), (cell.strip() for cell in line), strict=True))
    assert (shown["n"], shown["tokens/s"], shown["tpot ms"]) == ("1", "2.8 (2.8-2.8)", "100.0")


def test_the_peer_is_timed_token_by_token(tmp_path: Path) -> None:
    """Like a server's answer: the first token after prefill, the last one at the end."""
    clone_with_tokenizer(TARGET, tmp_path)
    result = TransformersPeer(tmp_path).run(Prompt("x", "hello"), 5, 0.0)
    (answer,) = result.answers
    assert answer.num_tokens == len(answer.token_ids) == 5
    assert answer.num_prompt_tokens > len("hello")
    assert 0 < answer.ttft_ms < result.wall_s * 1000
    assert answer.tpot_ms == pytest.approx((result.wall_s * 1000 - answer.ttft_ms) / 4)


def test_files_have_rows_options_and_environment(tmp_path: Path) -> None:
    results = [
        _result(mode, PROMPTS[0], [1] * 11, wall_s, concurrency)
        for mode, wall_s in (("off", 2.0), ("off:again", 1.9), ("compact", 1.0))
        for concurrency in (1, 2)
    ]
    rows, verdicts = make_rows(results, "off"), judge(results, parse_modes("off,off:again,compact"))
    write_json(tmp_path / "out.json", rows, verdicts, {"max_tokens": 11}, {"passed": True})
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["rows"][0]["mode"] == "off"
    assert content["environment"].keys() >= {"device", "cores", "torch", "transformers"}
    assert [each["to_best"]["median"] for each in content["comparisons"]] == [2.0, 2.0]
    write_csv(tmp_path / "out.csv", rows)
    with (tmp_path / "out.csv").open() as opened:
        read = list(csv.DictReader(opened))
    assert [row["mode"] for row in read] == [row["mode"] for row in rows]
    assert float(read[2]["speedup"]) == 2.0
    plot_rows(rows, "a", "title", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_groups_hold_one_class_or_all_in_turn() -> None:
    one, two, three = PROMPTS
    assert make_groups(PROMPTS, 2, is_mixed=False, repeats=None) == [[one, two], [three]]
    assert make_groups(PROMPTS, 2, is_mixed=True, repeats=None) == [[one, three], [two]]
    assert make_groups(PROMPTS, 2, is_mixed=True, repeats=3) == [[one, three], [two, one], [three, two]]
    assert make_groups(PROMPTS, 2, is_mixed=False, repeats=1) == [[one, two], [three, three]]


def _options(**changes: Any) -> BenchOptions:
    fixed: dict[str, Any] = {"concurrencies": (1, 2), "modes": parse_modes("off"), **changes}
    return BenchOptions((), limit=1, max_tokens=8, temperature=0.0, seed=None, **fixed)


def test_fewer_prompts_than_run_at_once_are_refused_unless_they_may_come_again() -> None:
    require_full_groups(_options(concurrencies=(1,)), PROMPTS)
    with pytest.raises(ConfigurationError, match="b has 1 prompts, so 2 of them never run at once"):
        require_full_groups(_options(), PROMPTS)
    require_full_groups(_options(is_mixed=True), PROMPTS)
    with pytest.raises(ConfigurationError, match="all has 3 prompts, so 4"):
        require_full_groups(_options(is_mixed=True, concurrencies=(4,)), PROMPTS)
    require_full_groups(_options(concurrencies=(64,), repeats=(2,)), PROMPTS)


def test_repeats_are_for_all_concurrencies_or_one_each() -> None:
    assert [_options(repeats=(9, 3)).num_groups(concurrency) for concurrency in (1, 2)] == [9, 3]
    assert [_options(repeats=(4,)).num_groups(2), _options().num_groups(2)] == [4, None]
    with pytest.raises(ConfigurationError, match="3 repeats for 2 concurrencies"):
        _options(repeats=(1, 2, 3))
