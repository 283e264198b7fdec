"""What chunks tell of their steps, where a request asks: it adds up to the summary, and to the step as a whole."""

from __future__ import annotations

import math

import pytest
from fakes.executors import fake_pair
from fakes.rig import running


@pytest.mark.parametrize("mode", ["off", "static", "compact", "cap-accept"])
def test_reports_add_up_to_the_summary(mode: str) -> None:
    with running(mode, fake_pair(quality=0.7)) as rig:
        streams = rig.submit_all([[1, 2, 3], [4, 5], [6, 7]], 24, reports_steps=True)
        summaries = [stream.wait().choices[0] for stream in streams]
        rig.wait_until_idle()
        ledger = rig.scheduler.load().ledger
    for stream, summary in zip(streams, summaries, strict=True):
        reports = [chunk.report for chunk in stream.chunks if chunk.report is not None]
        assert len(reports) == len(stream.chunks) == summary.num_steps + 1
        assert sum(report.num_drafted for report in reports) == summary.num_drafted
        assert sum(report.num_drafted > 0 for report in reports) == summary.num_drafted_steps
        for chunk, report in zip(stream.chunks, reports, strict=True):
            assert len(report.confidences) == chunk.num_verified <= report.budget
            assert chunk.num_accepted <= report.num_uncut_accepted <= chunk.num_verified
            assert all(0 <= confidence <= 1 for confidence in report.confidences)
    assert (sum(summary.num_drafted for summary in summaries) > 0) == (mode != "off")
    # Every step tells its budget and its rows to each of its rows: what all rows verified, each step counted once.
    of_all = [chunk.report for stream in streams for chunk in stream.chunks if chunk.report is not None]
    assert math.isclose(sum(report.budget / report.num_rows for report in of_all), ledger.num_verified, abs_tol=1e-6)
    assert {report.num_rows for report in of_all} >= {3}


def test_no_report_unless_asked_for() -> None:
    with running("static") as rig:
        asks, is_silent = rig.submit_all([[1, 2, 3]], 12, reports_steps=True)[0], rig.submit([4, 5, 6], 12)
        asks.wait()
        is_silent.wait()
        assert [chunk.report for chunk in is_silent.chunks] == [None] * len(is_silent.chunks)
        assert all(chunk.report is not None for chunk in asks.chunks if chunk.token_ids)


def test_confidences_are_those_of_the_row() -> None:
    """The fake drafter knows which of its drafts are right: where rows were mixed up, it would seem not to."""
    with running("static", fake_pair(quality=0.7)) as rig:
        streams = rig.submit_all([[1, 2, 3], [4, 5], [6, 7]], 24, reports_steps=True)
        for stream in streams:
            stream.wait()
    outcomes = set()
    for report in (chunk.report for stream in streams for chunk in stream.chunks if chunk.report is not None):
        for index, confidence in enumerate(report.confidences[: report.num_uncut_accepted + 1]):
            outcomes.add((confidence > 0.5, index < report.num_uncut_accepted))
    assert outcomes == {(True, True), (False, False)}
