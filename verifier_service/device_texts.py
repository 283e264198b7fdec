"""Texts of requests that control their logits, on a device: counts there, tokens here.

A captured step begins by counting the tokens that the text has gained up to the row's anchor; the drafts behind it are
counted by the kernels of `kernels.logit_controls.triton` themselves. So what a step emitted is counted by the next one,
and nothing that is counted is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.logit_controls.triton import ControlSlots
from kernels.rejection_sample import InvalidRowError
from kernels.sampling import TargetOptions
from verifier_service.session_memory import MAX_BANNED_SEQUENCES, MAX_BANNED_TOKENS, MAX_STOP_IDS, SessionSizes

_ROOM = MAX_BANNED_SEQUENCES, MAX_BANNED_TOKENS, MAX_STOP_IDS
"""A captured step needs a bound; a row beyond it fails alone."""


@dataclass
class _Text:
    options: TargetOptions
    """Whose text it is: a slot that is taken again has others."""
    tokens: list[int]
    num_counted: int = 0
    """Of the tokens, those that the device has counted."""


class DeviceTexts:
    """What a session's device knows of controlled texts, by slot. Used on the engine thread only."""

    def __init__(self, sizes: SessionSizes, vocab_size: int, device: torch.device) -> None:
        """Room for every slot."""
        self.controls = ControlSlots.empty(sizes.num_slots, vocab_size, _ROOM, device)
        """In place; read by captured steps."""
        self._max_added = sizes.max_draft_tokens + 1
        self._texts: dict[int, _Text] = {}

    def begin(self, slot: int, options: TargetOptions, anchor: int, anchor_id: int) -> list[int]:
        """The tokens, at most max_draft_tokens + 1, that the device has to add to a slot's text so that it ends with
        the token at position `anchor`.

        Raises InvalidRowError if the text up to there is not known, or there is no room for the controls.
        """
        text = self._texts.get(slot)
        if text is None or text.options is not options:
            text = self._texts[slot] = _Text(options, list(options.text_ids))
        tokens, num_counted = text.tokens, text.num_counted
        if anchor > len(tokens):
            raise InvalidRowError(f"the text is known up to position {len(tokens)}, the anchor is at {anchor}")
        is_counted = anchor == num_counted - 1 and tokens[anchor] == anchor_id
        del tokens[anchor:]
        tokens.append(anchor_id)
        added = tokens[num_counted:]
        if not num_counted or len(added) > self._max_added or (anchor < num_counted and not is_counted):
            text.num_counted, added = 0, []
            try:
                self.controls.take(slot, options.controls, tokens, options.num_prompt)
            except ValueError as error:
                raise InvalidRowError(str(error)) from error
        text.num_counted = len(tokens)
        return added

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Appends what a slot emitted; where less of it is committed, the next anchor says so."""
        self._texts[slot].tokens += token_ids
