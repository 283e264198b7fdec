"""Phases of steps as JSON lines."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from fakes.rig import running

from service_kit.errors import ConfigurationError


@pytest.mark.parametrize("mode", ["off", "static"])
def test_every_phase_of_every_step_has_a_line(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with running(mode, trace_steps=path) as rig:
        rig.submit([1, 2, 3], 12).wait()
        step_ids = [call.step_id for call in rig.verifier.calls]
        draft_ids = [call.step_id for call in rig.drafter.calls]
    spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        spans[record["phase"]].append((record["step_id"], record["start_ns"], record["end_ns"]))
    for phase in ("forward", "step_call", "commit"):
        assert [step_id for step_id, _, _ in spans[phase]] == step_ids
    assert [step_id for step_id, _, _ in spans["draft_call"]] == draft_ids
    for own in ("step_call", "commit"):
        assert all(start <= end for _, start, end in spans[own])
        assert all(before[2] <= after[1] for before, after in zip(spans[own], spans[own][1:], strict=False))


def test_a_file_that_cannot_be_written_stops_the_start_in_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="set DSPARK_SCHEDULER_TRACE_STEPS"),
        running("off", trace_steps=tmp_path / "no" / "steps.jsonl"),
    ):
        pass
