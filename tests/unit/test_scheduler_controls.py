"""What a request may ask of the target: refusals name the field, and scores keep to their tokens."""

from __future__ import annotations

from typing import Any

import pytest

from kernels.sampling import LogitControls
from kernels.token_scores import TokenScore
from scheduler_service.admission import Limits, accept_request
from scheduler_service.batch import Batch
from scheduler_service.commit import Committer
from scheduler_service.ledger import Ledger
from scheduler_service.request import Event, GenerateSpec, Request, SamplingOptions, TokenChunk
from scheduler_service.step_plan import PlannedRow

LIMITS = Limits(4, 64, 32, 100, 4, 50, frozenset({0}), 5, 32)


def accept(sampling: dict[str, Any] | None = None, **spec: Any) -> Request:
    fields = {"request_id": "a", "prompt": [1, 2, 3], "sampling": SamplingOptions(**(sampling or {})), **spec}
    return accept_request(GenerateSpec(**fields), LIMITS, lambda _: None)


@pytest.mark.parametrize(
    ("sampling", "spec", "field"),
    [
        ({"frequency_penalty": 2.1}, {}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, {}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, {}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, {}, "repetition_penalty"),
        ({"logit_bias": ((50, 1.0),)}, {}, "logit_bias"),
        ({"logit_bias": ((4, -100.5),)}, {}, "logit_bias"),
        ({"logit_bias": ((4, 1.0), (4, 2.0))}, {}, "logit_bias"),
        ({"bad_words": ((3, 50),)}, {}, "bad_words"),
        ({"bad_words": ((),)}, {}, "bad_words"),
        ({"min_tokens": 5}, {"max_tokens": 4}, "min_tokens"),
        ({"min_tokens": -1}, {}, "min_tokens"),
        ({}, {"stop_token_ids": frozenset({50})}, "stop_token_ids"),
        ({}, {"num_logprobs": 21}, "num_logprobs"),
        ({}, {"num_prompt_logprobs": -1}, "num_prompt_logprobs"),
    ],
)
def test_what_is_out_of_range_is_refused(sampling: dict[str, Any], spec: dict[str, Any], field: str) -> None:
    with pytest.raises(Exception, match=field) as caught:
        accept(sampling, **spec)
    assert getattr(caught.value, "field", "") == field


def test_a_request_without_wishes_costs_the_target_nothing() -> None:
    request = accept(stop_token_ids=frozenset({4}))
    assert request.controls == LogitControls()
    assert request.choices[0].target_options() is None
    assert request.reuses_prefix


def test_options_carry_the_text_as_it_stands() -> None:
    request = accept({"min_tokens": 2}, stop_token_ids=frozenset({4}), num_choices=2, num_prompt_logprobs=1)
    first, second = request.choices
    first.tokens.append(9)
    options = first.target_options()
    assert options is not None
    assert (options.text_ids, options.num_prompt, options.controls.stop_token_ids) == ((1, 2, 3, 9), 3, (0, 4))
    assert (options.num_logprobs, options.num_prompt_logprobs) == (None, 1)
    assert second.target_options() is not None
    assert getattr(second.target_options(), "num_prompt_logprobs", 0) is None
    assert not request.reuses_prefix
    ends = accept({"min_tokens": 2}, stop_token_ids=frozenset({4}), ignore_eos=True).choices[0].target_options()
    assert ends is not None
    assert ends.controls.stop_token_ids == (4,)


def score(rank: int) -> TokenScore:
    return TokenScore(-1.0, rank, (), ())


def test_scores_are_cut_with_the_tokens_and_told_once() -> None:
    batch = Batch(LIMITS)
    events: list[Event] = []
    committer = Committer(batch, Ledger(), "", lambda _: None)
    spec = GenerateSpec("a", [1, 2, 3], max_tokens=6, stop_token_ids=frozenset({8}), num_logprobs=0)
    request = accept_request(spec, batch.limits, events.append)
    batch.enqueue(request)
    (sequence,) = batch.admit()
    for scores in ([score(1)], [score(1), score(2)]):  # the second time after a preemption
        row = PlannedRow(sequence, 0, 2, emits=False, prompt_scores=scores)
        committer.commit(row, 0, [], 1)
        sequence.computed = 0
    sequence.computed = 2
    row = PlannedRow(sequence, 2, 1, emits=True, drafts=[7, 8, 9], scores=[score(n) for n in (3, 4, 5, 6)])
    row.commit_len = 3
    committer.commit(row, 3, [7, 8, 9, 10], 2)
    chunks = [event for _, event in committer.take_events() if isinstance(event, TokenChunk)]
    assert [[each.rank for each in chunk.prompt_scores] for chunk in chunks] == [[1], [2], []]
    assert (chunks[-1].token_ids, [each.rank for each in chunks[-1].scores]) == ([7, 8], [3, 4])
