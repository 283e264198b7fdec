"""What a sampling kernel needs to know about a row: plain values, no wire types."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Regime(enum.IntEnum):
    """How a request's tokens are chosen; the numbers are those of the wire."""

    GREEDY = 1
    COUPLED = 2
    REJECTION = 3


@dataclass(frozen=True)
class SlotSampling:
    """Sampling constants of a slot. Neutral values leave the distribution as the target gives it."""

    regime: Regime
    temperature: float = 1.0
    """> 0 unless greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """1 keeps all."""
    min_p: float = 0.0
    """0 keeps all."""
    key: int = 0
    """64-bit key of the request's random streams; the seed for coupled slots."""

    @property
    def is_filtered(self) -> bool:
        """Whether any of top-k, top-p, min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True)
class LogitControls:
    """What a request changes in the target's logits before temperature and filters. Neutral values change nothing.

    Applied at every position with all the text before it, drafts included; see `kernels.logit_controls`.
    """

    repetition_penalty: float = 1.0
    """> 0. Divides the positive and multiplies the negative logits of tokens that the prompt or the answer holds."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time that the answer holds the token."""
    presence_penalty: float = 0.0
    """Subtracted once if the answer holds the token."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); no id twice."""
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer must not complete; none empty."""
    min_tokens: int = 0
    """The answer cannot end before it has so many tokens: until then `stop_token_ids` are banned."""
    stop_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether tokens of the text are penalised."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_neutral(self) -> bool:
        """Whether nothing is changed."""
        return not (
            self.has_penalties or self.bias or self.banned_sequences or (self.min_tokens and self.stop_token_ids)
        )


@dataclass(frozen=True)
class TargetOptions:
    """What a slot asks of the target beyond `SlotSampling`. The drafter knows nothing of it."""

    controls: LogitControls
    text_ids: tuple[int, ...]
    """Prompt and answer when the slot was taken."""
    num_prompt: int
    """Tokens of `text_ids` that are the prompt."""
    num_logprobs: int | None = None
    """Scores every emitted token, with so many of the likeliest tokens; None does not."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second on."""

    @property
    def named_ids(self) -> tuple[int, ...]:
        """Every token id that is named."""
        controls = self.controls
        banned = (token_id for sequence in controls.banned_sequences for token_id in sequence)
        return (*(token_id for token_id, _ in controls.bias), *banned, *controls.stop_token_ids, *self.text_ids)
