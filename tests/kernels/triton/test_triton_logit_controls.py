"""Controls of many windows on the device, against the reference row by row, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.logit_controls.reference import controlled_logits as reference
from kernels.logit_controls.triton import ControlSlots, commit_tokens, control_rows, controlled_logits
from kernels.sampling import LogitControls

VOCAB, GAMMA = 63, 3
CONTROLS = [
    LogitControls(repetition_penalty=1.3, frequency_penalty=0.37, presence_penalty=-0.21),
    LogitControls(bias=((5, 2.5), (62, -100.0)), banned_sequences=((9,), (3, 4), (1, 2, 4), (4, 4)), min_tokens=3,
                  stop_token_ids=(7, 8)),
    LogitControls(repetition_penalty=0.7, bias=((4, 1.0),), banned_sequences=((2, 3, 1, 4),), min_tokens=6,
                  stop_token_ids=(0,)),
]  # fmt: skip
TEXTS = [([1, 2, 2, 5, 4, 4, 30], 3), ([9, 1], 2), ([2, 3], 1)]
"""Tokens, and how many of them are the prompt."""
DRAFTS = [[4, 4, 30], [2, 4, 4], [1, 4, 5]]


def expected_rows(logits: np.ndarray, texts: list[tuple[list[int], int]]) -> np.ndarray:
    """Of windows that begin with the first request's, [requests * (GAMMA + 1), V]."""
    return np.stack(
        [
            reference(logits[request * (GAMMA + 1) + k], CONTROLS[request], [*tokens, *DRAFTS[request][:k]], num_prompt)
            for request, (tokens, num_prompt) in enumerate(texts)
            for k in range(GAMMA + 1)
        ]
    )


def test_windows_and_what_was_committed() -> None:
    rng = np.random.default_rng(1)
    num_windows = len(CONTROLS) + 1  # the last one controls nothing
    logits = rng.standard_normal((num_windows * (GAMMA + 1) + 1, VOCAB)).astype(np.float32)
    logits[-1] = math.nan
    slots = torch.tensor([2, 0, 1, -1], dtype=torch.int32)
    arena = ControlSlots.empty(3, VOCAB, (4, 4, 2))
    for request, (controls, (tokens, num_prompt)) in enumerate(zip(CONTROLS, TEXTS, strict=True)):
        arena.take(int(slots[request]), controls, tokens, num_prompt)
    row_starts = torch.arange(num_windows, dtype=torch.int32) * (GAMMA + 1)
    request_of_row = torch.tensor([*np.repeat(np.arange(num_windows), GAMMA + 1), -1], dtype=torch.int32)
    drafts = torch.tensor([*DRAFTS, [0, 0, 0]], dtype=torch.int32)
    texts = TEXTS
    for num_committed in ((3, 1, 2, 3), (0, 0, 0, 0)):
        own = torch.from_numpy(logits.copy())
        control_rows(own, request_of_row, row_starts, slots, drafts, arena)
        num_controlled = len(CONTROLS) * (GAMMA + 1)
        np.testing.assert_array_equal(own[:num_controlled].numpy(), expected_rows(logits, texts))
        np.testing.assert_array_equal(own[num_controlled:].numpy(), logits[num_controlled:])
        commit_tokens(slots, drafts, torch.tensor(num_committed, dtype=torch.int32), arena)
        texts = [
            ([*tokens, *DRAFTS[request][: num_committed[request]]], num_prompt)
            for request, (tokens, num_prompt) in enumerate(texts)
        ]


@pytest.mark.parametrize("request_", range(len(CONTROLS)))
def test_one_row_with_the_signature_of_the_reference(request_: int) -> None:
    row = np.random.default_rng(request_).standard_normal(VOCAB).astype(np.float32)
    arguments = row, CONTROLS[request_], *TEXTS[request_]
    np.testing.assert_array_equal(controlled_logits(*arguments), reference(*arguments))


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="room for 1 sequences of 2 tokens and 1 stop ids"):
        ControlSlots.empty(1, VOCAB, (1, 2, 1)).take(0, CONTROLS[2], [1], 1)
