"""An executor's copy of slots and page tables refuses what the scheduler could not have meant."""

from __future__ import annotations

import pytest
from dspark.v1 import types_pb2

from kernels.sampling import Regime
from service_kit.errors import SessionMismatchError
from service_kit.slots import SlotTable


def make_table() -> SlotTable:
    return SlotTable(num_slots=2, num_pages=8, max_model_len=40, page_size=16)


def admission(slot: int) -> types_pb2.SlotAdmission:
    return types_pb2.SlotAdmission(slot=slot, regime=types_pb2.REGIME_COUPLED, temperature=0.5, key=2**64 - 1)


def test_releases_then_admissions_then_pages() -> None:
    table = make_table()
    pages = types_pb2.SlotUpdates(admissions=[admission(1)], page_slots=[1, 1], page_indices=[0, 1], page_ids=[5, 3])
    table.apply(pages)
    sampling = table.sampling[1]
    assert sampling is not None
    assert (sampling.regime, sampling.key) == (Regime.COUPLED, 2**64 - 1)
    assert table.page_table[1].tolist() == [5, 3, -1]
    table.require_span(1, 0, 32)
    table.apply(types_pb2.SlotUpdates(releases=[1], admissions=[admission(1)]))
    assert table.page_table[1].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    "updates",
    [
        types_pb2.SlotUpdates(releases=[2]),
        types_pb2.SlotUpdates(admissions=[admission(9)]),
        types_pb2.SlotUpdates(page_slots=[0], page_indices=[3], page_ids=[0]),
        types_pb2.SlotUpdates(page_slots=[0], page_indices=[0], page_ids=[8]),
        types_pb2.SlotUpdates(page_slots=[0], page_indices=[0]),
        types_pb2.SlotUpdates(admissions=[types_pb2.SlotAdmission(slot=0)]),
    ],
)
def test_what_is_out_of_range_is_refused(updates: types_pb2.SlotUpdates) -> None:
    with pytest.raises(SessionMismatchError):
        make_table().apply(updates)


@pytest.mark.parametrize(("start", "count"), [(0, 17), (16, 1), (32, 17)])
def test_a_span_without_pages_is_refused(start: int, count: int) -> None:
    table = make_table()
    table.apply(
        types_pb2.SlotUpdates(admissions=[admission(0)], page_slots=[0, 0], page_indices=[0, 2], page_ids=[1, 2])
    )
    table.require_span(0, 0, 16)
    with pytest.raises(SessionMismatchError, match="no pages"):
        table.require_span(0, start, count)
    with pytest.raises(SessionMismatchError, match="not admitted"):
        table.require_span(1, 0, 1)
