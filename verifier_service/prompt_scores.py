"""Scores of prompt tokens, computed with the chunk that holds the token before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from kernels.token_scores import TokenScore
from kernels.token_scores.cpu import token_score
from verifier_service.session import Session
from verifier_service.steps import StepBatch

_MAX_ROWS = 32
"""Rows whose logits are held at once: a chunk's would take hundreds of megabytes."""


def score_prompts(
    session: Session, batch: StepBatch, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> dict[int, list[TokenScore]]:
    """Scores by row, for slots that ask for them: of the prompt tokens after each of the row's positions.

    `hidden` holds the forward's result of every token row of the batch; `logits_of` makes logits of some of them.
    """
    scores: dict[int, list[TokenScore]] = {}
    for row, slot in enumerate(batch.row_slots.tolist()):
        options = session.slots.target[slot]
        if options is None or options.num_prompt_logprobs is None:
            continue
        start = int(batch.row_starts[row])
        following = options.text_ids[start + 1 : min(start + 1 + int(batch.row_num_tokens[row]), options.num_prompt)]
        if not following:
            continue
        first = int(np.sum(batch.row_num_tokens[:row]))
        own = scores[row] = []
        for done in range(0, len(following), _MAX_ROWS):
            part = following[done : done + _MAX_ROWS]
            logits = logits_of(hidden[first + done : first + done + len(part)]).numpy()
            own += [token_score(*each, options.num_prompt_logprobs) for each in zip(logits, part, strict=True)]
    return scores
