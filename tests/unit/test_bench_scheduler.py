"""Timing the scheduler over executors that answer at once: whole steps of the kind that is asked for."""

from __future__ import annotations

import pytest

from bench.scheduler import SchedulerBench, main
from kernels.sampling import Regime
from simulator.cost_table import load_table


@pytest.mark.parametrize("regime", [Regime.GREEDY, Regime.REJECTION])
def test_drafted_steps_draft_every_row_and_commit(regime: Regime) -> None:
    bench = SchedulerBench(3, load_table("cpu"), regime, is_drafting=True)
    before = [len(sequence.tokens) for sequence in bench.batch.running]
    for _ in range(20):
        critical, whole = bench.step_ns()
        assert 0 < critical < whole  # what is learned from a step waits for the next call
    for sequence, start in zip(bench.batch.running, before, strict=True):
        assert sequence.num_drafted_steps >= 20
        assert len(sequence.tokens) >= start + 20
        assert sequence.num_accepted > 0
    bench.batch.check_integrity()


def test_plain_steps_draft_nothing() -> None:
    bench = SchedulerBench(3, load_table("cpu"), Regime.GREEDY, is_drafting=False)
    assert all(bench.step_ns().whole > 0 for _ in range(20))
    assert all(sequence.num_tokens >= 20 and not sequence.num_drafted for sequence in bench.batch.running)


def test_the_command_prints_a_line_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "2", "--steps", "3"])
    out = capsys.readouterr().out
    assert [line.split(",")[1].split()[0] for line in out.splitlines()] == ["plain", "drafted", "drafted"]
