"""What a step is made of: budgets, look-ahead pages, limits of drafts; and what executors are told about slots."""

from __future__ import annotations

import pytest

from kernels.sampling import Regime, SlotSampling
from scheduler_service.admission import Limits, accept_request
from scheduler_service.batch import Batch
from scheduler_service.planner import plan_chained, plan_step
from scheduler_service.prefill_limit import PrefillCosts, PrefillLimit
from scheduler_service.request import GenerateSpec, Sequence
from scheduler_service.slot_updates import SlotUpdates
from scheduler_service.step_plan import PlannedRow


def _batch(**limits: int) -> Batch:
    sizes = {
        "max_num_seqs": 8,
        "max_model_len": 64,
        "max_batch_tokens": 32,
        "num_pages": 40,
        "page_size": 4,
        "vocab_size": 50,
        "block_size": 5,
        "feature_ring_rows": 16,
    }
    return Batch(Limits(**{**sizes, **limits}, eos_token_ids=frozenset()))  # type: ignore[arg-type]


def _admit(batch: Batch, prompt_len: int, max_tokens: int = 20, *, decoding: bool) -> Sequence:
    spec = GenerateSpec(f"r{len(batch.running)}", [1] * prompt_len, max_tokens=max_tokens)
    request = accept_request(spec, batch.limits, lambda event: None)
    batch.enqueue(request)
    assert list(batch.admit()) == request.choices
    sequence = request.choices[0]
    if decoding:
        sequence.computed = sequence.ingested = prompt_len
        sequence.tokens.append(7)
    return sequence


def test_prefill_goes_in_chunks_and_only_the_last_one_emits() -> None:
    batch = _batch()
    sequence = _admit(batch, 30, decoding=False)
    shapes = []
    while sequence.computed < 30:
        (row,) = plan_step(batch).rows
        shapes.append((row.num_tokens, row.emits, row.max_drafts))
        sequence.computed += row.num_tokens
        sequence.ingested = sequence.computed
    assert shapes == [(16, False, 0), (14, True, 0)]  # the feature ring holds 16 rows


def test_drafts_leave_a_quarter_of_the_step_to_prefill() -> None:
    batch = _batch()
    for _ in range(4):
        _admit(batch, 3, decoding=True)
    newcomer = _admit(batch, 20, decoding=False)
    plan = plan_step(batch)
    assert [row.max_drafts for row in plan.rows] == [5, 5, 5, 5, 0]
    assert (plan.rows[-1].sequence, plan.rows[-1].num_tokens) == (newcomer, 32 - 4 - 20)
    batch = _batch(max_batch_tokens=24)
    for _ in range(4):
        _admit(batch, 3, decoding=True)
    _admit(batch, 20, decoding=False)
    plan = plan_step(batch)
    assert [row.max_drafts for row in plan.rows] == [3, 3, 4, 4, 0]
    assert sum(row.num_tokens + row.max_drafts for row in plan.rows) == 24


def test_drafts_stop_before_max_tokens_and_the_context() -> None:
    batch = _batch()
    _admit(batch, 3, max_tokens=4, decoding=True)  # one token is out: three remain
    _admit(batch, 3, max_tokens=2, decoding=True)
    _admit(batch, 60, max_tokens=99, decoding=True)  # the context holds four, one is out
    assert [row.max_drafts for row in plan_step(batch).rows] == [2, 0, 2]


def test_a_page_is_reserved_for_every_position_that_may_be_written() -> None:
    batch = _batch()
    sequence = _admit(batch, 3, decoding=True)
    (row,) = plan_step(batch).rows
    assert row.max_drafts == 5
    assert len(sequence.pages) == 3  # positions 0 ... 8
    batch.trim_pages(sequence)
    assert len(sequence.pages) == 1
    batch.check_integrity()


def test_pages_of_drafts_not_accepted_come_back_where_pages_are_short() -> None:
    batch = _batch()
    sequence = _admit(batch, 3, decoding=True)
    plan_step(batch)
    batch.return_surplus()
    assert len(sequence.pages) == 3  # the next block needs them
    taken = batch.pages.allocate(batch.pages.num_free - 3)
    batch.return_surplus()
    assert len(sequence.pages) == 3  # the anchor's and a block's to each are still free
    taken += batch.pages.allocate(1)
    batch.return_surplus()
    assert len(sequence.pages) == 1
    batch.pages.free(taken)
    batch.check_integrity()


def test_pages_of_drafts_not_accepted_come_back_where_others_wait_for_them() -> None:
    batch = _batch(num_pages=16)
    sequence = _admit(batch, 3, decoding=True)
    plan_step(batch)
    batch.return_surplus()
    assert len(sequence.pages) == 3
    batch.enqueue(accept_request(GenerateSpec("waiting", [1] * 44, max_tokens=8), batch.limits, lambda event: None))
    batch.return_surplus()
    assert len(sequence.pages) == 1


def test_drafts_shrink_to_the_pages_left() -> None:
    batch = _batch(num_pages=2)
    _admit(batch, 3, decoding=True)
    (row,) = plan_step(batch).rows
    assert row.max_drafts == 0  # 5 drafts would need a third page, and the rest of the first is the anchor's
    batch.pages.check_integrity([sequence.pages for sequence in batch.running])


def test_no_draft_without_its_context() -> None:
    batch = _batch()
    lost, behind, plain = (_admit(batch, 6, decoding=True) for _ in range(3))
    lost.context_lost = "gone"
    lost.ingested = 0
    behind.ingested = 2
    plain.is_plain_once = True
    plan = plan_step(batch)
    assert [row.max_drafts for row in plan.rows] == [0, 5, 0]
    assert plan.ingests == [behind]
    assert [row.max_drafts for row in plan_step(batch).rows] == [0, 5, 5]


def _shape(row: PlannedRow) -> tuple[int, int, bool, bool]:
    return row.start, row.num_tokens, row.emits, row.is_chained


def _limited(max_decode_steps: float, **limits: int) -> Batch:
    batch = _batch(**{"block_size": 0, "feature_ring_rows": 0, "max_batch_tokens": 64, **limits})
    costs = PrefillCosts(decode_ns=10.0, chunk_ns={8: 10.0, 16: 18.0, 32: 50.0}, context_ns=0.01)
    batch.prefill_limit = PrefillLimit(costs, max_decode_steps)
    return batch


@pytest.mark.parametrize(
    ("max_decode_steps", "num_rows"),
    [(0.01, 8), (0.4, 12), (0.8, 16), (2.4, 24), (4.0, 32), (5.0, 37), (99.0, 60)],
)
def test_prefill_beside_decode_rows_is_bounded_by_time(max_decode_steps: float, num_rows: int) -> None:
    # Above the decode step: 8 rows cost nothing, 16 rows 8 ns, 32 rows 40 ns, each further one 2 ns.
    batch = _limited(max_decode_steps)
    _admit(batch, 3, decoding=True)
    newcomer = _admit(batch, 60, decoding=False)
    rows = plan_step(batch).rows
    assert [(row.sequence, row.num_tokens) for row in rows[1:]] == [(newcomer, num_rows)]
    assert [row.num_tokens for row in plan_chained(batch, rows[:1])] == [1, num_rows]


def test_prefill_alone_is_bounded_by_tokens_only() -> None:
    batch = _limited(0.5)
    _admit(batch, 60, decoding=False)
    assert [row.num_tokens for row in plan_step(batch).rows] == [60]


def test_a_long_context_takes_rows_from_its_chunk() -> None:
    batch = _limited(4.0, max_model_len=512, num_pages=400)
    _admit(batch, 3, decoding=True)
    far = _admit(batch, 450, decoding=False)
    far.computed = 400  # each row costs 4 ns more: nine make 1 + 36 of the 40 ns
    assert [row.num_tokens for row in plan_step(batch).rows] == [1, 9]
    far.computed = 440
    near = _admit(batch, 30, decoding=False)
    rows = plan_step(batch).rows
    assert [(row.sequence, row.num_tokens) for row in rows[1:]] == [(far, 6), (near, 12)]


def test_chunks_of_one_step_share_its_time() -> None:
    batch = _limited(2.4, max_num_seqs=4)
    _admit(batch, 3, decoding=True)
    for _ in range(2):
        _admit(batch, 20, decoding=False)
    assert [row.num_tokens for row in plan_step(batch).rows] == [1, 20, 4]


def test_a_chain_goes_from_chunk_to_chunk_to_unknown_anchors() -> None:
    batch = _batch(block_size=0, feature_ring_rows=0, max_batch_tokens=16)
    _admit(batch, 36, max_tokens=3, decoding=False)
    rows, shapes = plan_step(batch).rows, []
    while rows:
        shapes += [_shape(row) for row in rows]
        following = plan_chained(batch, rows)
        for row in rows:  # its result arrives now
            row.sequence.computed += row.num_tokens
            row.sequence.tokens += [7] * row.emits
        rows = following
    assert shapes == [
        (0, 16, False, False),
        (16, 16, False, False),
        (32, 4, True, False),
        (36, 1, True, True),
        (37, 1, True, True),  # the third token ends the answer: nothing is chained to it
    ]


def test_a_chain_takes_newcomers_and_gives_every_row_a_page() -> None:
    batch = _batch(block_size=0, feature_ring_rows=0)
    old = _admit(batch, 3, decoding=True)
    rows = plan_step(batch).rows
    new = _admit(batch, 5, decoding=False)
    rows = plan_chained(batch, rows)
    assert [(row.sequence, *_shape(row)) for row in rows] == [(old, 4, 1, True, True), (new, 0, 5, True, False)]
    assert len(old.pages) == 2  # positions 0 ... 4


def test_a_void_row_is_planned_anew_one_step_later() -> None:
    batch = _batch(block_size=0, feature_ring_rows=0)
    failed, good = _admit(batch, 3, decoding=True), _admit(batch, 3, decoding=True)
    rows = plan_step(batch).rows
    rows_behind = plan_chained(batch, rows)
    good.tokens.append(7)  # the result of the first step: one row failed
    good.computed += 1
    rows_after = plan_chained(batch, rows_behind)
    assert [(row.sequence, *_shape(row)) for row in rows_after] == [(good, 5, 1, True, True)]
    assert [_shape(row) for row in plan_chained(batch, rows_after) if row.sequence is failed] == [(3, 1, True, False)]


def test_a_chain_ends_where_the_result_is_needed() -> None:
    batch = _batch(block_size=0, feature_ring_rows=0, num_pages=3)
    for _ in range(2):
        _admit(batch, 2, decoding=True)  # position 2 is the anchor's: a page each
    for sequence in batch.running:
        sequence.tokens.append(7)
        sequence.computed += 1
    rows = plan_step(batch).rows
    assert plan_chained(batch, rows) == []  # one page for two anchors: nobody is preempted for a guess
    assert len(batch.running) == 2
    batch = _batch()
    sequence = _admit(batch, 6, decoding=True)
    rows = plan_step(batch).rows
    assert plan_chained(batch, rows) == []  # it may draft
    sequence.context_lost = "gone"
    assert [_shape(row) for row in plan_chained(batch, rows)] == [(7, 1, True, True)]


def test_a_release_makes_what_was_pending_moot() -> None:
    updates = SlotUpdates()
    sampling = SlotSampling(Regime.GREEDY)
    updates.admit(1, sampling)
    updates.set_pages(1, 0, [5, 6])
    updates.admit(2, sampling)
    updates.set_pages(2, 3, [7])
    updates.release(1)
    updates.release(1)
    updates.admit(1, sampling)
    updates.set_pages(1, 0, [8])
    taken = updates.take()
    assert taken == SlotUpdates([1], {1: sampling, 2: sampling}, [2, 1], [3, 0], [7, 8])
    assert updates == SlotUpdates()


def test_a_short_prompt_does_not_wait_for_a_long_one_to_end() -> None:
    batch = _batch(max_model_len=512, num_pages=400, block_size=0, feature_ring_rows=0)
    for prompt_len in (400, 300, 3):
        _admit(batch, prompt_len, decoding=False)
    rows = plan_step(batch).rows
    assert [(row.num_tokens, row.emits) for row in rows] == [(24, False), (6, False), (2, False)]
    batch.release(batch.running[1])
    assert [(row.num_tokens, row.emits) for row in plan_step(batch).rows] == [(29, False), (3, True)]


def test_no_number_of_short_prompts_starves_a_long_one() -> None:
    batch = _batch(max_model_len=512, num_pages=400, block_size=0, feature_ring_rows=0)
    long = _admit(batch, 400, decoding=False)
    num_steps = 0
    while not long.is_decoding:
        while len(batch.running) < 8:
            _admit(batch, 9, max_tokens=1, decoding=False)
        for row in plan_step(batch).rows:
            row.sequence.computed += row.num_tokens
            if row.emits:
                row.sequence.tokens.append(7)
                if row.sequence is not long:
                    batch.release(row.sequence)
        num_steps += 1
    assert num_steps == -(-400 // 24)  # three quarters of every step


def test_nobody_overtakes_who_waits_for_pages() -> None:
    batch = _batch(num_pages=8)
    old = _admit(batch, 12, decoding=False)
    for name, size in (("long", 28), ("short", 1)):
        batch.enqueue(accept_request(GenerateSpec(name, [1] * size), batch.limits, lambda event: None))
    assert list(batch.admit()) == []
    batch.release(old)
    assert [sequence.request.request_id for sequence in batch.admit()] == ["long"]
    batch.release(batch.running[0])
    assert [sequence.request.request_id for sequence in batch.admit()] == ["short"]
