"""Answers that must have a form, through a whole engine on the golden models: they have it, and are the same with
speculation on or off, at any load, and across preemption."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.rig import Stream
from in_process import GOLDEN_TARGET, Executors
from tiny_target import END_OF_TURN, clone_with_tokenizer
from tokenizers import Tokenizer

from scheduler_service.draft_gate import NOTHING, Candidates, DraftDecision, OpenGate, StepShape
from scheduler_service.grammar.form import StructuredOutput
from scheduler_service.grammar.matcher import MatcherError
from scheduler_service.grammar.token_masks import TokenMasks
from scheduler_service.request import FinishReason, GenerateSpec, SamplingOptions
from scheduler_service.service import Scheduler
from scheduler_service.step_plan import PlannedRow
from service_kit.errors import InvalidRequestError

NUM_TOKENS = 70
PROMPTS = [[(7 * i + 11 * j) % 512 for j in range(5 + 9 * i)] for i in range(4)]
REGEX = "[ab]{3}(w3[0-9]{2}[,;]){9}[^w]{4,8}!"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"enum": ["w300", "w301", 12]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMS = (StructuredOutput("regex", REGEX), StructuredOutput("json_schema", json.dumps(SCHEMA)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    clone_with_tokenizer(GOLDEN_TARGET, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_TURN}))
    return directory


@pytest.fixture(scope="module")
def executors(target: Path) -> Iterator[Executors]:
    executors = Executors(target)
    yield executors
    executors.close()


def run(scheduler: Scheduler, *, at_once: bool, temperature: float = 0.9, **asked: Any) -> list[Stream]:
    """A request a prompt, with one form after the other; the last one is free."""
    streams = []
    grammars = [*(scheduler.compile(FORMS[index % 2]).result() for index in range(3)), None]
    for index, (prompt, grammar) in enumerate(zip(PROMPTS, grammars, strict=True)):
        options = SamplingOptions(temperature, seed=index, **asked)
        stream = Stream()
        spec = GenerateSpec(f"r{index}", prompt, options, NUM_TOKENS, ignore_eos=grammar is None, grammar=grammar)
        scheduler.submit(spec, stream)
        streams.append(stream)
        if not at_once:
            stream.wait()
    for stream in streams:
        assert stream.wait().error == ""
    return streams


def assert_form(index: int, stream: Stream, target: Path) -> None:
    """The text is of the form of its request."""
    *token_ids, end = stream.text()
    assert end == END_OF_TURN
    assert stream.wait().choices[0].finish_reason is FinishReason.STOP
    text = Tokenizer.from_file(str(target / "tokenizer.json")).decode(token_ids, skip_special_tokens=False)
    if index % 2 == 0:
        assert re.fullmatch(REGEX, text, re.DOTALL), text
    else:
        answer = json.loads(text)
        assert answer.keys() == {"a", "b"}
        assert len(answer["a"]) <= 4
        assert answer["b"] in ("w300", "w301", 12)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_texts_have_their_form_whatever_is_drafted(executors: Executors, target: Path, temperature: float) -> None:
    found = []
    for mode, at_once in (("off", True), ("static", False), ("static", True), ("compact", True)):
        with executors.scheduler(mode, tokenizer=target, max_model_len=112) as scheduler:
            streams = run(scheduler, at_once=at_once, temperature=temperature)
            if mode == "static":
                assert all(stream.wait().choices[0].num_verified for stream in streams)
                accepted = [stream.wait().choices[0].num_accepted for stream in streams[:3]]
                assert any(accepted) or temperature, "an untrained drafter seldom guesses samples"
        for index, stream in enumerate(streams[:3]):
            assert_form(index, stream, target)
        found.append([stream.text() for stream in streams])
    assert found[0] == found[1] == found[2] == found[3]


def test_preemption_leaves_matchers_where_they_were(executors: Executors, target: Path) -> None:
    found = []
    few_pages = {"kv_memory": 8 * executors.page_bytes, "prefix_cache": "off"}
    for mode, settings in (("off", {}), ("static", few_pages)):
        with executors.scheduler(mode, tokenizer=target, max_model_len=112, **settings) as scheduler:
            grammar, stream, options = scheduler.compile(FORMS[0]).result(), Stream(), SamplingOptions(seed=4)
            scheduler.submit(GenerateSpec("r", PROMPTS[0], options, num_choices=4, grammar=grammar), stream)
            found.append([stream.text(choice) for choice in range(4)])
            assert (scheduler.load().num_preemptions > 0) is (mode == "static")
    assert found[0] == found[1]
    assert all(text[-1] == END_OF_TURN for text in found[0])


def test_controls_give_way_where_they_would_leave_nothing(executors: Executors, target: Path) -> None:
    for mode in ("off", "static"):
        with executors.scheduler(mode, tokenizer=target, max_model_len=112) as scheduler:
            streams = run(scheduler, at_once=True, temperature=0.0, min_tokens=45, frequency_penalty=0.4)
        for index, stream in enumerate(streams[:3]):
            assert_form(index, stream, target)


def test_sampled_choices_have_the_form_and_go_their_own_ways(executors: Executors, target: Path) -> None:
    with executors.scheduler("static", tokenizer=target, max_model_len=112) as scheduler:
        grammar, stream = scheduler.compile(FORMS[0]).result(), Stream()
        scheduler.submit(GenerateSpec("r", PROMPTS[1], max_tokens=NUM_TOKENS, num_choices=4, grammar=grammar), stream)
        texts = [stream.text(choice) for choice in range(4)]
    decode = Tokenizer.from_file(str(target / "tokenizer.json")).decode
    for text in texts:
        assert re.fullmatch(REGEX, decode(text[:-1], skip_special_tokens=False), re.DOTALL), text
    assert len({tuple(text) for text in texts}) > 1


@pytest.mark.parametrize("is_everything", [False, True], ids=["one matcher", "all masks"])
def test_a_broken_matcher_ends_its_own_request(
    executors: Executors, target: Path, monkeypatch: pytest.MonkeyPatch, is_everything: bool
) -> None:
    fill = TokenMasks.fill

    def break_later(self: TokenMasks, step_id: int, rows: list[PlannedRow]) -> dict[int, Exception]:
        victim = next((row.sequence for row in rows if row.sequence.request.request_id == "r1"), None)
        if victim is not None and victim.num_tokens >= 3:
            if is_everything:
                raise ValueError("no masks today")
            with contextlib.suppress(MatcherError):
                victim.matcher.advance([END_OF_TURN - 1])  # a token that the form does not allow
        return fill(self, step_id, rows)

    monkeypatch.setattr(TokenMasks, "fill", break_later)
    with executors.scheduler("static", tokenizer=target, max_model_len=112) as scheduler:
        streams = [Stream() for _ in PROMPTS]
        grammar = scheduler.compile(FORMS[0]).result()
        for index, (prompt, stream) in enumerate(zip(PROMPTS, streams, strict=True)):
            form = grammar if index < 3 else None
            options = SamplingOptions(0.0)
            spec = GenerateSpec(f"r{index}", prompt, options, NUM_TOKENS, ignore_eos=form is None, grammar=form)
            scheduler.submit(spec, stream)
        summaries = [stream.wait() for stream in streams]
    assert summaries[1].error.startswith("structured_output: ")
    assert summaries[1].choices[0].finish_reason is FinishReason.ERROR
    assert len(streams[1].text()) == summaries[1].choices[0].num_tokens >= 3, "what was committed is delivered"
    assert summaries[3].error == "", "a free answer goes on"
    for index in (0, 2):
        assert is_everything or summaries[index].error == ""


class NeverDrafts(OpenGate):
    """Counts plain steps, and those that tell what plain steps take."""

    num_plain = num_steady = 0

    def decide(self, shape: StepShape, candidates: Candidates) -> DraftDecision:
        return NOTHING

    def observe_plain(self, shape: StepShape, elapsed_ns: int, *, is_steady: bool, is_disturbed: bool) -> float:
        self.num_plain += 1
        self.num_steady += is_steady
        return 0.0


def test_plain_steps_with_masks_tell_what_plain_steps_take(executors: Executors, target: Path) -> None:
    with executors.scheduler("static", tokenizer=target, max_model_len=112) as scheduler:
        gate = scheduler._batch.draft_gate = NeverDrafts(7)
        stream = Stream()
        grammar = scheduler.compile(FORMS[0]).result()
        scheduler.submit(GenerateSpec("r", PROMPTS[0], SamplingOptions(0.0), NUM_TOKENS, grammar=grammar), stream)
        stream.wait()
    assert gate.num_plain > 20
    assert gate.num_steady >= gate.num_plain - 2


def test_refusals(executors: Executors, target: Path) -> None:
    with executors.scheduler("off", tokenizer=target) as scheduler:
        grammar = scheduler.compile(FORMS[0]).result()
        with pytest.raises(InvalidRequestError, match="ignore_eos"):
            scheduler.submit(GenerateSpec("r", [1], grammar=grammar, ignore_eos=True), Stream())
    with executors.scheduler("off") as scheduler:
        assert "DSPARK_SCHEDULER_TOKENIZER" in scheduler.info.structured_output_off_reason
        with pytest.raises(InvalidRequestError, match="DSPARK_SCHEDULER_TOKENIZER"):
            scheduler.compile(FORMS[0])
