"""Measuring costs at start: every kind of call is made, everything borrowed is given back, files are used again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.executors import FakeDrafter, FakeVerifier, fake_pair

from scheduler_service.admission import Limits
from scheduler_service.batch import Batch
from scheduler_service.calibrate_cost import QUICK, Effort
from scheduler_service.calibrate_prefill import measure_prefill
from scheduler_service.cost_model_file import cost_file_path, load_costs
from scheduler_service.cost_model_start import CostSource
from scheduler_service.executor_types import SessionSizes
from scheduler_service.executors import DrafterClient, VerifierClient
from scheduler_service.transport import InProcessTransport
from service_kit.errors import ConfigurationError


def _batch(**limits: int) -> Batch:
    sizes = {
        "max_num_seqs": 4,
        "max_model_len": 64,
        "max_batch_tokens": 24,
        "num_pages": 40,
        "page_size": 4,
        "vocab_size": 50,
        "block_size": 5,
        "feature_ring_rows": 16,
    }
    return Batch(Limits(**{**sizes, **limits}, eos_token_ids=frozenset()))  # type: ignore[arg-type]


def _source(batch: Batch) -> tuple[CostSource, tuple[FakeVerifier, FakeDrafter]]:
    fakes, limits = fake_pair(), batch.limits
    verifier = VerifierClient(InProcessTransport(fakes[0]), 1.0)
    drafter = DrafterClient(InProcessTransport(fakes[1]), 1.0)
    sizes = SessionSizes(
        1, limits.max_num_seqs, limits.num_pages, limits.max_model_len, limits.max_batch_tokens, 16, 5, (1, 3)
    )
    drafter.attach(sizes, verifier.attach(sizes))
    info = replace(drafter.info(), elastic_block_sizes=())
    return CostSource(batch, verifier, verifier.info(), itertools.count(1), drafter, info), fakes


@pytest.mark.parametrize(
    ("limits", "contexts"),
    [
        ({}, {4, 52}),
        ({"num_pages": 5}, {4}),
        ({"feature_ring_rows": 6}, {4, 52}),
        ({"max_model_len": 12}, {4}),
    ],
)
def test_measured_and_everything_given_back(limits: dict[str, int], contexts: set[int]) -> None:
    batch = _batch(**limits)
    source, (verifier, drafter) = _source(batch)
    shares: list[float] = []
    costs, measured = source.measure(Effort(2, 60.0, 1, (4, 52), 2), shares.append)
    assert costs.model is not None
    assert measured is not None
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert measured.spread >= 0
    emitting = [call for call in verifier.calls if call.row_emits[0]]
    assert {start for call in emitting for start in call.row_starts} == contexts | {0}  # 0: prefill's decode step
    assert {point.num_tokens for point in measured.steps} >= {1, 2, 3, 5, 8}
    assert {(point.num_rows, point.num_tokens) for point in measured.steps} >= {(1, 2), (2, 2)}
    assert {point.num_drafted for point in measured.drafts} >= {1, 2}
    ingesting = [call for call in drafter.calls if call.row_slots and call.ingest_slots]
    assert all(call.row_slots == call.ingest_slots for call in ingesting)
    assert list(costs.model.block_draft_ns) == [5]
    batch.check_integrity()
    assert batch.pages.num_free == batch.limits.num_pages
    slots = sorted(batch.drafter_updates.releases)
    heard = {slot for call in verifier.calls for slot in call.slots.releases}  # with prefill's calls
    assert slots == sorted(heard | set(batch.verifier_updates.releases))
    assert slots == list(range(max(point.num_drafted for point in measured.drafts)))


def test_without_time_small_sizes_are_measured_once_and_large_ones_extrapolated() -> None:
    source, _ = _source(_batch())
    costs, measured = source.measure(Effort(5, 1e-6, 1, (4,), 2), lambda share: None)
    assert measured is not None
    assert costs.model is not None
    assert max(point.num_tokens for point in measured.steps) == 16
    assert {point.num_drafted for point in measured.drafts} == {1, 2, 3, 4}
    assert measured.spread == 0.0  # one measurement of each shape
    assert costs.model.token_ns.size == 25


def test_no_row_writes_where_another_reads_or_writes() -> None:
    source, (verifier, _) = _source(_batch())
    written: list[list[int]] = []

    def note(request: Any) -> None:
        if request.row_emits[0] and len(request.row_slots) > 1:
            starts = zip(request.row_slots, request.row_starts, strict=True)
            written.append([int(verifier.slots.page_table[slot][start // 4]) for slot, start in starts])

    verifier.after_step = note
    source.measure(Effort(1, 60.0, 1, (4, 52), 2), lambda share: None)
    assert written
    assert all(len(set(pages)) == len(pages) for pages in written)


def test_context_is_counted_where_it_is_read() -> None:
    source, (verifier, _) = _source(_batch())
    _, measured = source.measure(Effort(1, 60.0, 1, (4,), 2), lambda share: None)
    assert measured is not None
    # 3 tokens in one row behind 4 positions read 4, 5 and 6; in three rows 4 each.
    read = {point.num_rows: point.num_context for point in measured.steps if point.num_tokens == 3}
    assert read[1] == 15.0
    assert read[3] == 12.0
    assert [1, 1, 1] in [list(call.row_num_tokens) for call in verifier.calls]


def test_a_later_start_measures_nothing(tmp_path: Path) -> None:
    fingerprint = {"target": "toy"}
    source, (verifier, _) = _source(_batch())
    first = source.obtain(fingerprint, tmp_path, None)
    num_calls = len(verifier.calls)
    second = source.obtain(fingerprint, tmp_path, None)
    assert len(verifier.calls) == num_calls > 0
    assert str(first) == str(second)
    assert str(source.obtain(fingerprint, None, cost_file_path(tmp_path, fingerprint))) == str(first)
    with pytest.raises(ConfigurationError, match="target is 'toy' there and 'other' here"):
        source.obtain({"target": "other"}, tmp_path, cost_file_path(tmp_path, fingerprint))
    cost_file_path(tmp_path, fingerprint).write_text("{}")  # damaged: measured again, and mended
    source.obtain(fingerprint, tmp_path, None)
    assert len(verifier.calls) > num_calls
    assert load_costs(cost_file_path(tmp_path, fingerprint), fingerprint).model is not None


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "costs").write_text("a file where the directory would be")
    source, _ = _source(_batch())
    assert source.obtain({"target": "toy"}, tmp_path, None).model is not None
    assert "the next start measures again" in caplog.text


def test_too_little_room_says_what_to_raise() -> None:
    with pytest.raises(ConfigurationError, match="raise max_model_len to 12"):
        _source(_batch(max_model_len=8))[0].measure(QUICK, lambda share: None)


@pytest.mark.parametrize(
    "limits", [{}, {"num_pages": 4}, {"max_model_len": 6}, {"block_size": 0, "feature_ring_rows": 0}]
)
def test_prefill_is_measured_at_start_and_everything_given_back(limits: dict[str, int]) -> None:
    batch, (fake, _) = _batch(**limits), fake_pair()
    verifier, sizes = VerifierClient(InProcessTransport(fake), 1.0), batch.limits
    ring_rows = sizes.feature_ring_rows
    verifier.attach(
        SessionSizes(
            1, sizes.max_num_seqs, sizes.num_pages, sizes.max_model_len, sizes.max_batch_tokens, ring_rows, 0, ()
        )
    )
    costs = measure_prefill(batch, verifier, itertools.count(1))
    assert costs.decode_ns > 0
    assert costs.context_ns >= 0
    assert max(costs.chunk_ns) == max(max(call.row_num_tokens) for call in fake.calls)
    added = [costs.added_ns(rows) for rows in range(300)]
    assert added[0] == 0
    assert added == sorted(added)
    assert "prefill ms by rows" in str(costs)
    batch.check_integrity()
    assert batch.pages.num_free == sizes.num_pages
    assert batch.verifier_updates.releases == [0]
