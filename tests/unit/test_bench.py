"""Benchmark arithmetic: prompts, equality of outputs, rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_target import TARGET, clone_with_tokenizer

from bench.equality import find_divergences
from bench.measure import COUNTERS, GroupResult
from bench.peer import TransformersPeer
from bench.prompts import Prompt, load_prompts
from bench.report import make_rows, print_table, write_json
from bench.serve import require_full_groups
from launcher.client import Answer
from service_kit.errors import ConfigurationError

PROMPTS = [Prompt("a", "one"), Prompt("a", "two"), Prompt("b", "three")]


def _answer(token_ids: list[int], seconds: float) -> Answer:
    return Answer(
        0.0,
        token_ids=token_ids,
        first_token=0.5,
        last_token=0.5 + seconds,
        num_tokens=len(token_ids),
        num_prompt_tokens=3,
    )


def _result(mode: str, prompt: Prompt, token_ids: list[int], wall_s: float, concurrency: int = 1) -> GroupResult:
    counters = dict.fromkeys(COUNTERS, 0) | {
        "num_steps": 10,
        "num_verify_rows": 10,
        "num_accepted": 5,
        "num_verified": 20,
        "step_ns": 100_000_000,
        "draft_call_ns": 30_000_000,
        "step_call_ns": 60_000_000,
        "drafter_model_ns": 25_000_000,
        "verifier_model_ns": 55_000_000,
    }
    return GroupResult(mode, prompt.prompt_class, concurrency, (_answer(token_ids, 1.0),), wall_s, counters)


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
    assert find_divergences(results, PROMPTS, "off") == (3, [])


def test_the_first_divergence_is_found_also_where_one_answer_ended() -> None:
    results = [_result("off", prompt, [1, 2, 3], 1.0) for prompt in PROMPTS]
    results += [
        _result("static", prompt, ids, 1.0) for prompt, ids in zip(PROMPTS, ([1, 9, 3], [1, 2], [1, 2, 3]), strict=True)
    ]
    num_compared, (first, second) = find_divergences(results, PROMPTS, "off")
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


def test_rows_pair_each_group_with_the_baseline() -> None:
    results = [_result("off", prompt, [1] * 11, 2.0) for prompt in PROMPTS]
    results += [
        _result("static", prompt, [1] * 11, wall) for prompt, wall in zip(PROMPTS, (1.0, 2.0, 4.0), strict=True)
    ]
    rows = {(row["class"], row["mode"]): row for row in make_rows(results, "off")}
    assert set(rows) == {(name, mode) for name in ("a", "b", "all") for mode in ("off", "static")}
    static = rows["all", "static"]
    assert static["speedup"] == 1.0
    assert rows["a", "static"]["speedup"] == 1.5
    assert static["tokens_per_second"] == 5.5
    assert static["tpot_ms_p50"] == pytest.approx(100.0)
    assert static["accepted_length"] == 1.5
    assert static["verify_length"] == 2.0
    assert (static["step_ms"], static["draft_ms"], static["verify_ms"]) == (10.0, 3.0, 6.0)
    assert static["outside_models_share"] == pytest.approx(0.2)


def test_engines_without_counters_get_rows_too() -> None:
    results = [_result("off", PROMPTS[0], [1] * 11, 2.0)]
    results.append(replace(results[0], mode="transformers", counters={}, wall_s=4.0))
    peer = make_rows(results, "off")[-1]
    assert peer["speedup"] == 0.5
    assert "step_ms" not in peer
    with (console := Console(width=200)).capture() as capture:
        print_table(console, make_rows(results, "off"), "off")
    header = next(line for line in capture.get().splitlines() if "tokens/s" in line).split("┃")
    line = next(line for line in capture.get().splitlines() if "transformers" in line).split("│")
    shown = dict(zip((cell.strip() for cell in header), (cell.strip() for cell in line), strict=True))
    assert (shown["n"], shown["ratio"], shown["step ms"]) == ("1", "0.50", "")


def test_the_peer_is_timed_token_by_token(tmp_path: Path) -> None:
    """Like a server's answer: the first token after prefill, the last one at the end."""
    clone_with_tokenizer(TARGET, tmp_path)
    result = TransformersPeer(tmp_path).run(Prompt("x", "hello"), 5, 0.0)
    (answer,) = result.answers
    assert answer.num_tokens == len(answer.token_ids) == 5
    assert answer.num_prompt_tokens > len("hello")
    assert 0 < answer.ttft_ms < result.wall_s * 1000
    assert answer.tpot_ms == pytest.approx((result.wall_s * 1000 - answer.ttft_ms) / 4)


def test_json_has_rows_options_and_environment(tmp_path: Path) -> None:
    rows = make_rows([_result("off", PROMPTS[0], [1] * 11, 2.0)], "off")
    write_json(tmp_path / "out.json", rows, {"max_tokens": 11}, {"passed": True})
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["rows"][0]["mode"] == "off"
    assert content["environment"].keys() >= {"device", "cores", "torch", "transformers"}


def test_a_class_with_fewer_prompts_than_run_at_once_is_refused() -> None:
    require_full_groups(PROMPTS, [1])
    with pytest.raises(ConfigurationError, match="b has 1 prompts, so 2 of them never run at once"):
        require_full_groups(PROMPTS, [1, 2])
