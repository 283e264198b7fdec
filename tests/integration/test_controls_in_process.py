"""Controls and scores through a whole engine on the golden models: the same with speculation on or off, at any load,
and across preemption."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes.rig import Stream
from in_process import Executors

from kernels.token_scores import TokenScore
from scheduler_service.request import GenerateSpec, SamplingOptions
from scheduler_service.service import Scheduler

NUM_TOKENS = 20
PROMPTS = [[(7 * i + 11 * j) % 512 for j in range(5 + 9 * i)] for i in range(4)]
ASKED: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": -0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": ((3, 3.5), (9, -100.0))},
    "bad words": {"bad_words": ((221,), (480, 259)), "frequency_penalty": -0.5},
    "min tokens": {"min_tokens": 15, "logit_bias": ((40, 90.0),)},
}


@pytest.fixture(scope="module")
def executors() -> Iterator[Executors]:
    executors = Executors()
    yield executors
    executors.close()


def run(scheduler: Scheduler, *, at_once: bool, **asked: Any) -> list[Stream]:
    """One request a prompt, greedy ones and seeded ones."""
    streams = []
    for index, prompt in enumerate(PROMPTS):
        stream = Stream()
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": index}
        spec = {key: asked[key] for key in asked if key.startswith("num_")}
        options = SamplingOptions(**sampling, **{key: asked[key] for key in asked if key not in spec})
        stop = frozenset({40})
        scheduler.submit(GenerateSpec(f"r{index}", prompt, options, NUM_TOKENS, stop, **spec), stream)
        streams.append(stream)
        if not at_once:
            stream.wait()
    for stream in streams:
        assert stream.wait().error == ""
    return streams


def texts(streams: list[Stream]) -> list[list[int]]:
    return [stream.text() for stream in streams]


@pytest.mark.parametrize("name", ASKED)
def test_the_text_does_not_depend_on_speculation_load_or_preemption(executors: Executors, name: str) -> None:
    found = []
    few_pages = {"kv_memory": 7 * executors.page_bytes, "prefix_cache": "off"}
    for mode, at_once, settings in (("off", True, {}), ("static", False, {}), ("static", True, few_pages)):
        with executors.scheduler(mode, **settings) as scheduler:
            streams = run(scheduler, at_once=at_once, **ASKED[name])
            found.append(texts(streams))
            if mode == "static":
                assert all(stream.wait().choices[0].num_verified for stream in streams)
            if settings and name != "min tokens":  # whose answers are short
                assert scheduler.load().num_preemptions > 0
    assert found[0] == found[1] == found[2]
    if name == "min tokens":
        assert all(text[-1] == 40 and len(text) == 16 for text in found[0]), found[0]


def test_scores_do_not_depend_on_speculation(executors: Executors) -> None:
    found: list[list[TokenScore]] = []
    for mode in ("off", "static"):
        with executors.scheduler(mode) as scheduler:
            streams = run(scheduler, at_once=True, num_logprobs=3, num_prompt_logprobs=2, frequency_penalty=0.5)
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            scores = [score for chunk in stream.chunks for score in chunk.scores]
            assert len(scores) == len(stream.text())
            assert all(len(chunk.scores) == len(chunk.token_ids) for chunk in stream.chunks)
            prompt_scores = [score for chunk in stream.chunks for score in chunk.prompt_scores]
            assert len(prompt_scores) == len(prompt) - 1
            assert {len(score.top_ids) for score in prompt_scores} == {2}
            found.append(prompt_scores + scores)
    assert found[:4] == found[4:]
