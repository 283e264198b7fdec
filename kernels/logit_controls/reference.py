"""The truth: everything from the text, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.sampling import LogitControls


def controlled_logits(
    row: npt.NDArray[np.float32], controls: LogitControls, text_ids: Sequence[int], num_prompt: int
) -> npt.NDArray[np.float32]:
    """Logits [V] of the token after `text_ids`, which starts with the prompt's `num_prompt` tokens; `row` stays."""
    logits: npt.NDArray[np.float32] = row.copy()
    for token_id, bias in controls.bias:
        logits[token_id] += np.float32(bias)
    for token_id in set(text_ids):
        if logits[token_id] > 0:
            logits[token_id] /= np.float32(controls.repetition_penalty)
        else:
            logits[token_id] *= np.float32(controls.repetition_penalty)
    for token_id, count in Counter(text_ids[num_prompt:]).items():
        penalty = np.float32(controls.frequency_penalty) * np.float32(count) + np.float32(controls.presence_penalty)
        logits[token_id] -= penalty
    for sequence in controls.banned_sequences:
        start = len(text_ids) - len(sequence) + 1
        if start >= 0 and tuple(text_ids[start:]) == sequence[:-1]:
            logits[sequence[-1]] = -np.inf
    if len(text_ids) - num_prompt < controls.min_tokens:
        for token_id in controls.stop_token_ids:
            logits[token_id] = -np.inf
    return logits
