"""A line for every step, with what came of its rows and nothing of what was said."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from fakes.rig import running

from kernels.sampling import Regime
from launcher.cli import _trace
from scheduler_service.request import SamplingOptions
from service_kit.errors import ConfigurationError


def test_lines_add_up_to_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    with running("static", trace_rounds=path) as rig:
        streams = rig.submit_all([[1, 2, 3], [4, 5]], 12, sampling=SamplingOptions(temperature=0.0))
        summaries = [stream.wait() for stream in streams]
        step_ids = [call.step_id for call in rig.verifier.calls]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step_id"] for line in lines] == step_ids
    rounds = [each for line in lines for each in line["rounds"]]
    assert {each["request"] for each in rounds} == {0, 1}
    for number, summary in enumerate(summaries):
        own = [each for each in rounds if each["request"] == number]
        choice = summary.choices[0]
        assert len(own) == choice.num_steps
        assert sum(each["num_accepted"] for each in own) == choice.num_accepted
        assert sum(each["num_committed"] for each in own) == choice.num_tokens - 1  # the prompt's step gave the first
        assert all(a["position"] + a["num_committed"] == b["position"] for a, b in itertools.pairwise(own))
    assert {each["regime"] for each in rounds} == {Regime.GREEDY.name.lower()}
    assert any(len(each["confidences"]) == each["verify_len"] > 0 for each in rounds)
    for line in lines:
        assert line["num_tokens"] >= line["num_rows"]
        assert line["step_ns"] >= line["draft_ns"]
    keys = "request regime position confidences verify_len commit_len num_accepted num_committed is_audit"
    assert {key for each in rounds for key in each} == {*keys.split()}  # no text, no token ids


def test_a_file_that_cannot_be_written_stops_the_start_in_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="set DSPARK_SCHEDULER_TRACE_ROUNDS"),
        running("off", trace_rounds=tmp_path / "no" / "rounds.jsonl"),
    ):
        pass


def test_the_option_is_an_exporter_or_a_file() -> None:
    assert _trace(None) == (None, None)
    assert _trace("otlp") == ("otlp", None)
    assert _trace("./otlp") == (None, Path("otlp").resolve())
    with pytest.raises(Exception, match="none of console, otlp and a file"):
        _trace("oltp")
