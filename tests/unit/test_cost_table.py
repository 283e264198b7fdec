"""The cost table: monotone, in the engine's own row counts, extended beyond what was measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fakes.executors import fake_pair

from scheduler_service.admission import Limits
from scheduler_service.batch import Batch
from scheduler_service.calibrate_cost import measure_costs
from scheduler_service.calibrate_prefill import measure_prefill
from scheduler_service.cost_table import CostTable
from scheduler_service.executor_types import SessionSizes
from scheduler_service.executors import DrafterClient, VerifierClient
from scheduler_service.transport import InProcessTransport
from service_kit.errors import ConfigurationError


def _build(steps: dict[int, float], drafts: dict[int, float], **extra: object) -> CostTable:
    return CostTable.from_measurements(steps, drafts, max_tokens=16, max_drafted=4, **extra)  # type: ignore[arg-type]


def test_interpolates_and_extends() -> None:
    table = _build({1: 10, 2: 20, 4: 30}, {1: 5, 4: 8})
    assert table.step_ns[[0, 1, 2, 3, 4, 8, 16]].tolist() == [0, 10, 20, 25, 30, 50, 90]
    assert table.draft_ns.tolist() == [0, 5, 6, 7, 8]


def test_a_spike_cannot_make_more_rows_cheaper() -> None:
    table = _build({1: 10, 2: 50, 4: 30}, {1: 9, 2: 5})
    assert (np.diff(table.step_ns) >= 0).all()
    assert (np.diff(table.draft_ns) >= 0).all()
    assert table.step_ns[1:5].tolist() == [10, 40, 40, 40]  # the spike is shared with its neighbour


def test_padding_makes_steps() -> None:
    table = _build({1: 10, 4: 40, 8: 80}, {1: 1}, padded_rows=[1, 4, 4, 4, 8, 8, 8, 8])
    assert table.step_ns[1:9].tolist() == [10, 40, 40, 40, 80, 80, 80, 80]
    assert table.step_ns[9] == 90


def test_total_adds_drafting_to_every_candidate() -> None:
    table = _build({1: 10, 16: 160}, {1: 5, 4: 8})
    assert table.total_ns(2, 3, 0).tolist() == [20, 30, 40, 50]
    assert table.total_ns(2, 0, 4).tolist() == [28]


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


def _measure(batch: Batch) -> CostTable:
    fakes = fake_pair()
    verifier, drafter = (
        client(InProcessTransport(fake), 1.0)
        for client, fake in zip((VerifierClient, DrafterClient), fakes, strict=True)
    )
    limits = batch.limits
    sizes = SessionSizes(
        1, limits.max_num_seqs, limits.num_pages, limits.max_model_len, limits.max_batch_tokens, 16, 5, (1, 3)
    )
    drafter.attach(sizes, verifier.attach(sizes))  # type: ignore[union-attr, arg-type]
    table = measure_costs(batch, verifier, drafter, itertools.count(1), [1, 2, 4, 4])  # type: ignore[arg-type]
    assert {len(call.token_ids) for call in fakes[0].calls if call.row_emits[0]} >= {1, 2, 3, 5, 8}
    assert {len(call.row_slots) for call in fakes[1].calls if call.row_slots} >= {1, 2}
    return table


@pytest.mark.parametrize("limits", [{}, {"num_pages": 5}, {"feature_ring_rows": 6}, {"max_model_len": 12}])
def test_measured_at_start_and_everything_given_back(limits: dict[str, int]) -> None:
    batch = _batch(**limits)
    table = _measure(batch)
    assert (np.diff(table.step_ns) >= 0).all()
    assert (table.step_ns[1:] > 0).all()
    assert (table.draft_ns[1:] > 0).all()
    assert "step ms by token rows 1:" in str(table)
    batch.check_integrity()
    assert batch.pages.num_free == batch.limits.num_pages
    assert sorted(batch.verifier_updates.releases) == sorted(batch.drafter_updates.releases)


def test_too_little_room_says_what_to_raise() -> None:
    with pytest.raises(ConfigurationError, match="raise max_model_len to 10"):
        _measure(_batch(max_model_len=8))


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
