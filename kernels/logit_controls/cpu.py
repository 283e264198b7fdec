"""numpy over counts that grow with the text: the cost follows the distinct tokens of the text, not the vocabulary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kernels.sampling import LogitControls

_FIRST_CAPACITY = 64


class ControlledText:
    """The text of one request as far as it is known, and what it makes of logits."""

    def __init__(self, controls: LogitControls, token_ids: Sequence[int], num_prompt: int) -> None:
        """`token_ids` starts with the prompt's `num_prompt` tokens."""
        self.controls = controls
        self._num_prompt = num_prompt
        self._tokens: list[int] = []
        self._bias_ids = np.array([token_id for token_id, _ in controls.bias], np.int64)
        self._bias = np.array([bias for _, bias in controls.bias], np.float32)
        self._stop_ids = np.array(controls.stop_token_ids, np.int64)
        self._banned_ids = np.array([each[0] for each in controls.banned_sequences if len(each) == 1], np.int64)
        self._banned_after: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Longer banned sequences by their last token but one."""
        for sequence in controls.banned_sequences:
            if len(sequence) > 1:
                self._banned_after[sequence[-2]].append(sequence)
        self._places: dict[int, int] = {}
        """Place in `_counted_ids` and `_counts` of every token met so far."""
        self._counted_ids = np.zeros(_FIRST_CAPACITY, np.int64)
        self._counts = np.zeros((2, _FIRST_CAPACITY), np.float32)  # in the prompt, in the answer
        self.extend(token_ids)

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Appends tokens."""
        for token_id in token_ids:
            self._count(token_id, 1)
            self._tokens.append(token_id)

    def cut(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        while len(self._tokens) > length:
            self._count(self._tokens.pop(), -1)

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Changes the logits [V] of the token after the text, in place."""
        controls = self.controls
        if self._bias.size:
            logits[self._bias_ids] += self._bias
        if controls.has_penalties and self._places:
            self._penalise(logits)
        if self._banned_ids.size:
            logits[self._banned_ids] = -np.inf
        if self._banned_after and self._tokens:
            for sequence in self._banned_after.get(self._tokens[-1], ()):
                if tuple(self._tokens[-len(sequence) + 1 :]) == sequence[:-1]:
                    logits[sequence[-1]] = -np.inf
        if len(self._tokens) - self._num_prompt < controls.min_tokens:
            logits[self._stop_ids] = -np.inf

    def _penalise(self, logits: npt.NDArray[np.float32]) -> None:
        controls, num_ids = self.controls, len(self._places)
        ids, (in_prompt, in_answer) = self._counted_ids[:num_ids], self._counts[:, :num_ids]
        values = logits[ids]
        if controls.repetition_penalty != 1.0:
            penalty = np.float32(controls.repetition_penalty)
            repeated = np.where(values > 0, values / penalty, values * penalty)
            values = np.where(in_prompt + in_answer > 0, repeated, values)
        if controls.frequency_penalty or controls.presence_penalty:
            penalties = np.float32(controls.frequency_penalty) * in_answer + np.float32(controls.presence_penalty)
            values = np.where(in_answer > 0, values - penalties, values)
        logits[ids] = values

    def _count(self, token_id: int, change: int) -> None:
        """Counts the token at the end of the text."""
        if not self.controls.has_penalties:
            return
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._counted_ids.size:
            self._counted_ids = np.concatenate([self._counted_ids, np.zeros_like(self._counted_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._counted_ids[place] = token_id
        self._counts[int(len(self._tokens) >= self._num_prompt), place] += change
