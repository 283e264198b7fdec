"""What the scheduler counts for metrics, and its one line a request."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest
from fakes.executors import StepGate, fake_pair
from fakes.rig import running

from scheduler_service.counts import WindowCounts
from scheduler_service.request import FinishReason
from service_kit.errors import QueueFullError
from service_kit.metrics import Histogram


def test_windows_are_counted_by_length_and_by_step() -> None:
    counts = WindowCounts(4)
    counts.add([0, 4, 4])
    counts.add([1])
    assert counts.by_len == [1, 1, 0, 0, 2]
    buckets, total = counts.budgets.snapshot()
    assert (dict(buckets)["1.0"], dict(buckets)["8.0"], dict(buckets)["+Inf"], total) == (1, 2, 2, 9)


def test_accepted_lengths_are_those_of_the_chunks() -> None:
    with running("static", fake_pair(confidence=0.7, quality=0.7)) as rig:
        streams = rig.submit_all([[1, 2, 3], [7, 8]], 30)
        later = [stream.chunks[1:] for stream in streams if stream.wait()]
        seen = np.bincount([chunk.num_accepted for chunks in later for chunk in chunks], minlength=6)
        assert rig.scheduler.choice_counts.accepted_lens == seen.tolist()
        assert seen[1:].any()


def test_each_request_leaves_one_line_however_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running("static") as rig:
        rig.submit([1, 2, 3], 6, request_id="whole", num_choices=2).wait()
        aborted = rig.submit([4, 5], 60, request_id="cut")
        assert aborted.first_chunk.wait(20)
        rig.scheduler.abort("cut")
        rig.scheduler.abort("cut")
        aborted.wait()
        rig.wait_until_idle()
        counts = rig.scheduler.choice_counts
        assert counts.num_ended[FinishReason.LENGTH] + counts.num_ended[FinishReason.ABORT] == 3
    found = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request ended"]
    assert [line["request_id"] for line in found] == ["whole", "cut"]
    assert (found[0]["reasons"], found[0]["tokens"], found[0]["prompt_tokens"]) == (["length", "length"], 12, 3)
    assert 0 <= found[0]["first_token_s"] <= found[0]["seconds"]
    assert found[0]["accepted"] <= found[0]["verified"] <= found[0]["drafted"] > 0


def test_times_are_of_those_that_ran_and_refusals_are_counted() -> None:
    with running("static", max_queued_requests=1, max_num_seqs=1) as rig:
        rig.verifier.gate = StepGate()
        served = rig.submit([1, 2], 4)
        while rig.scheduler.queue[0]:  # until it has its slot
            time.sleep(0.001)
        waiting = rig.submit([3, 4], 4, request_id="waiting")
        assert rig.scheduler.queue == (1, 2)
        with pytest.raises(QueueFullError):
            rig.submit([5, 6], 4)
        assert rig.scheduler.num_refused == {"queue_full": 1, "draining": 0}
        rig.scheduler.abort("waiting")
        rig.verifier.gate.open()
        assert served.wait()
        assert waiting.wait()
        counts = rig.scheduler.choice_counts
        assert _count(counts.queue_s) == _count(counts.prefill_s) == _count(counts.decode_s) == 1
        assert _count(counts.generation_tokens) == 2
        assert counts.num_ended == {**dict.fromkeys(FinishReason, 0), FinishReason.LENGTH: 1, FinishReason.ABORT: 1}


def _count(histogram: Histogram) -> float:
    return histogram.snapshot()[0][-1][1]
