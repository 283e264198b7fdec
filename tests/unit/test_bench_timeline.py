"""The timeline of steps: gaps between forwards, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.timeline import Phase, gaps_of, main, read_trace
from service_kit.errors import ConfigurationError

MS = 1_000_000


def steps(*starts_ms: int) -> list[Phase]:
    """A forward of 8 ms and a head of 2 ms at each start."""
    return [
        phase
        for step_id, start in enumerate(starts_ms)
        for phase in (
            Phase(step_id, "forward", start * MS, (start + 8) * MS),
            Phase(step_id, "head", (start + 8) * MS, (start + 10) * MS),
        )
    ]


def test_gaps_lie_between_head_and_next_forward() -> None:
    gaps = gaps_of(steps(0, 11, 22, 35))
    assert (gaps.num_gaps, gaps.p50_ms, gaps.p95_ms, gaps.step_ms) == (3, 1.0, 3.0, 11.0)


def test_a_pause_without_work_is_no_gap() -> None:
    assert gaps_of(steps(0, 11, 22, 5000, 5011)).num_gaps == 3


def test_plots_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "steps.jsonl", tmp_path / "timeline.png"
    lines = [
        {"step_id": each.step_id, "phase": each.name, "start_ns": each.start_ns, "end_ns": each.end_ns}
        for each in steps(*range(0, 300, 11))
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    main([str(trace), "--out", str(out)])
    assert "p50 1.00 ms" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["no json\n", '{"step_id": 1}\n', "[1]\n"])
def test_files_that_are_no_trace_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "steps").write_text(text)
    with pytest.raises(ConfigurationError, match="no trace of steps"):
        read_trace(tmp_path / "steps")
    with pytest.raises(ConfigurationError, match="fewer than three"):
        gaps_of(steps(0, 11))
