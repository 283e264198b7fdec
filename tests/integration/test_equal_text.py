"""Speculation must not change the text: same token ids with off, static and compact, alone and together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.equality import find_divergences, logit_margins
from bench.measure import GroupResult
from bench.prompts import Prompt, load_prompts
from launcher.models import ModelPair

pytestmark = pytest.mark.model

PROMPTS = [
    Prompt("built-in", text)
    for text in (
        "List three uses of a paper clip.",
        "What is 17 + 25? Explain step by step.",
        "Write a Python function that reverses a string.",
        "Why is the sky blue?",
        "Write a short poem about the sea.",
        "Translate 'good morning' into French, German and Italian.",
    )
]
MODES = ("off", "static", "compact")
GREEDY = {"temperature": 0.0, "max_tokens": 24, "return_token_ids": True}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 11, "max_tokens": 24, "return_token_ids": True}
MAX_MARGIN = 1e-3
"""Logit difference below which float arithmetic alone may change a greedy token."""


def _run(
    engine_of: Any, modes: Sequence[str], concurrencies: Sequence[int], prompts: Sequence[Prompt], request: Any
) -> list[GroupResult]:
    return [
        engine_of(mode).run_group(prompts[start : start + concurrency], concurrency, request)
        for mode in modes
        for concurrency in concurrencies
        for start in range(0, len(prompts), concurrency)
    ]


def _assert_equal(results: Sequence[GroupResult], prompts: Sequence[Prompt], pair: ModelPair) -> None:
    num_compared, divergences = find_divergences(results, prompts, "off")
    assert num_compared >= len(prompts)
    margins = logit_margins(pair.target, divergences) if divergences else []
    lines = [each.describe(margin) for each, margin in zip(divergences, margins, strict=True)]
    print("\n".join(lines))
    assert all(margin is not None and margin < MAX_MARGIN for margin in margins), "\n".join(lines)


def test_greedy_text_is_the_same_in_every_mode(engine_of: Any, pair: ModelPair) -> None:
    results = _run(engine_of, MODES, (1, 4), PROMPTS, GREEDY)
    _assert_equal(results, PROMPTS, pair)
    drafted = [result for result in results if result.mode == "static"]
    assert sum(result.counters["num_accepted"] for result in drafted) > 0, "no draft was accepted: nothing was tested"
    off = [result for result in results if result.mode == "off"]
    assert sum(result.counters["num_drafted"] for result in off) == 0


def test_seeded_text_is_the_same_in_every_mode(engine_of: Any, pair: ModelPair) -> None:
    results = _run(engine_of, MODES, (1, 4), PROMPTS, SEEDED)
    _assert_equal(results, PROMPTS, pair)
    assert sum(result.counters["num_accepted"] for result in results) > 0
    greedy = engine_of("off").run_group(PROMPTS[:1], 1, GREEDY)
    assert greedy.answers[0].token_ids != results[0].answers[0].token_ids, "the seed was ignored"


def test_one_process_gives_the_same_text(engine_of: Any, pair: ModelPair) -> None:
    results = _run(engine_of, ("off", "one-process"), (1,), PROMPTS[:3], GREEDY)
    _assert_equal(results, PROMPTS[:3], pair)


@pytest.mark.skipif("EQUALITY_PROMPTS" not in os.environ, reason="set EQUALITY_PROMPTS to a directory of prompt files")
def test_greedy_text_of_prompt_files(engine_of: Any, pair: ModelPair) -> None:
    """8 prompts of each file, 128 tokens, concurrency 1 and 8: minutes."""
    prompts = load_prompts([Path(os.environ["EQUALITY_PROMPTS"])], 8)
    results = _run(engine_of, MODES, (1, 8), prompts, {**GREEDY, "max_tokens": 128})
    _assert_equal(results, prompts, pair)
