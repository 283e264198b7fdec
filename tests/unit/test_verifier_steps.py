"""Requests of a step: what is refused, and where its rows and logits lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dspark.v1 import types_pb2

from service_kit.errors import InvalidRequestError, ServiceError, SessionMismatchError
from service_kit.slots import SlotTable
from verifier_service.steps import Emission, StepBatch, emitted_rows, fill_chained, token_rows, validate


def make_batch(**changes: Any) -> StepBatch:
    """A prefill chunk that does not emit, a verify row and a last chunk."""
    fields: dict[str, Any] = {
        "row_slots": [2, 0, 1],
        "row_starts": [5, 30, 0],
        "row_num_tokens": [4, 3, 2],
        "row_num_drafts": [0, 2, 0],
        "row_rounds": [0, 7, 0],
        "token_ids": [10, 11, 12, 13, 14, 15, 16, 17, 18],
        **changes,
    }
    emits = np.array(fields.pop("row_emits", [False, True, True]))
    chained = np.array(fields.pop("row_chained", []), np.bool_)
    arrays = {name: np.array(values, np.int64) for name, values in fields.items()}
    slots = types_pb2.SlotUpdates()
    return StepBatch(session=1, epoch=1, step_id=1, slots=slots, row_emits=emits, row_chained=chained, **arrays)


def make_slots() -> SlotTable:
    slots = SlotTable(num_slots=5, num_pages=16, max_model_len=64, page_size=16)
    slots.apply(
        types_pb2.SlotUpdates(
            admissions=[types_pb2.SlotAdmission(slot=slot, regime=types_pb2.REGIME_GREEDY) for slot in (0, 1, 2, 3)],
            page_slots=[0, 0, 0, 1, 2, 3],  # slot 3 lacks the page before its only one
            page_indices=[0, 1, 2, 0, 0, 1],
            page_ids=[3, 4, 5, 6, 7, 8],
        )
    )
    return slots


def check(batch: StepBatch) -> None:
    validate(batch, make_slots(), vocab_size=100, max_batch_tokens=9, max_row_tokens=4)


def test_rows_and_logits_of_a_mixed_batch() -> None:
    batch = make_batch()
    check(batch)
    rows = token_rows(batch)
    assert rows.token_ids.tolist() == list(range(10, 19))
    assert rows.positions.tolist() == [5, 6, 7, 8, 30, 31, 32, 0, 1]
    assert rows.slots.tolist() == [2, 2, 2, 2, 0, 0, 0, 1, 1]
    emitted = emitted_rows(batch)
    assert emitted.rows.tolist() == [1, 2]
    assert emitted.offsets.tolist() == [0, 3]
    assert emitted.token_rows.tolist() == [4, 5, 6, 8]


def test_an_empty_step_is_valid() -> None:
    names = ("row_slots", "row_starts", "row_num_tokens", "row_num_drafts", "row_rounds", "token_ids")
    batch = make_batch(row_emits=np.array([], np.bool_), **{name: [] for name in names})
    check(batch)
    assert len(token_rows(batch).token_ids) == len(emitted_rows(batch).token_rows) == 0


def test_chained_rows_take_what_their_slot_emitted_for_their_position() -> None:
    rows: dict[str, Any] = {
        "row_slots": [2, 0, 1, 3],
        "row_starts": [5, 30, 7, 6],
        "row_num_tokens": [1, 2, 1, 1],
        "row_num_drafts": [0, 1, 0, 0],
        "row_rounds": [0, 0, 0, 0],
        "row_emits": [True] * 4,
        "row_chained": [True, False, True, True],
        "token_ids": [0, 11, 12, 0, 0],
    }
    batch = make_batch(**rows)
    failed = fill_chained(batch, {2: Emission(5, 40), 0: Emission(30, 41), 1: Emission(6, 42)})
    assert batch.token_ids.tolist() == [40, 11, 12, 0, 0]
    assert failed == {
        2: "slot 1 emitted no token for position 7 in the step before",
        3: "slot 3 emitted no token for position 6 in the step before",
    }


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"row_rounds": [0, 7]}, InvalidRequestError, "different lengths"),
        ({"row_num_tokens": [4, 3, 3]}, InvalidRequestError, "rows have 10 tokens, token_ids 9"),
        (
            {"row_num_tokens": [4, 3, 3], "token_ids": list(range(10))},
            InvalidRequestError,
            "10 tokens are more than max_batch_tokens 9",
        ),
        ({"token_ids": [100, *range(8)]}, InvalidRequestError, "token 100 is outside the vocabulary of 100"),
        ({"row_slots": [2, 0, 2]}, InvalidRequestError, "a slot has two rows"),
        ({"row_num_tokens": [0, 4, 4], "token_ids": list(range(8))}, InvalidRequestError, r"1 \.\.\. 4 tokens"),
        ({"row_num_tokens": [1, 5, 3]}, InvalidRequestError, r"1 \.\.\. 4 tokens"),
        ({"row_num_drafts": [0, 3, 0]}, InvalidRequestError, "an anchor before them"),
        ({"row_num_drafts": [1, 2, 0]}, InvalidRequestError, "a row that emits"),
        ({"row_slots": [2, 0, 4]}, SessionMismatchError, "slot 4 is not admitted"),
        ({"row_slots": [2, 0, 9]}, SessionMismatchError, "slot 9 is not admitted"),
        ({"row_starts": [13, 30, 0]}, SessionMismatchError, r"slot 2 has no pages for positions 0 \.\.\. 16"),
        ({"row_slots": [2, 3, 1], "row_starts": [5, 20, 0]}, SessionMismatchError, "slot 3 has no pages"),
        ({"row_starts": [5, 2**32 - 1, 0]}, SessionMismatchError, "slot 0 has no pages"),
        ({"row_chained": [False, False]}, InvalidRequestError, "row_chained has another length"),
        ({"row_chained": [False, True, False]}, InvalidRequestError, "a chained row has one token and emits"),
        (
            {"row_chained": [True, False, False], "row_num_tokens": [1, 3, 2], "token_ids": list(range(6))},
            InvalidRequestError,
            "a chained row has one token and emits",
        ),
    ],
)
def test_bad_rows_are_refused(changes: dict[str, Any], error: type[ServiceError], message: str) -> None:
    with pytest.raises(error, match=message):
        check(make_batch(**changes))
