"""The uncensored accepted length, estimated from trimmed rounds.

A block whose whole window was accepted but was trimmed says only that *at least* the window would have survived. The
trimmed drafts are settled later, against what is committed at their positions while the texts agree: a greedy or
coupled target accepts a draft exactly if it emits the same token itself; a rejection row accepts it with probability
min(1, target_probs / draft_probs), which is known as soon as the target has scored that position behind the same text:
that is its expectation, given the block. Where the text takes another way, or ends, what the target would have said
about the rest is not known: an interval. For a greedy or coupled row the first token that differs settles the block,
so only an abort leaves it open. `cap-accept` measures the same quantity by verifying everything; its value lies within
(for rejection rows up to the chance of its acceptance draws).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Row = TypeVar("Row", bound=Hashable)


class BlockRound(NamedTuple):
    """One round of one row."""

    position: int
    """Of the anchor; draft k is a token for position + 1 + k."""
    draft_ids: Sequence[int]
    """The whole block, as far as the row's limit allowed to verify it; what is behind a stop token does not count."""
    verify_len: int
    num_accepted: int
    committed_ids: Sequence[int]
    """Accepted drafts and one more token; fewer where the text ended before."""
    draft_probs: Sequence[float] = ()
    """Rejection rows: draft probability of each draft, NaN where not known. Empty: a draft is accepted exactly if the
    target emits it."""
    target_prob: Callable[[int, int], float] | None = None
    """Rejection rows: target probability by position and token id, at the positions of `committed_ids`, each behind the
    committed text before it; of the target as it is sampled from, masks and truncation applied. NaN: not known."""


class Interval(NamedTuple):
    """Mean accepted length of whole blocks, the one token that every round adds included."""

    low: float
    high: float
    num_blocks: int
    num_open: int
    """Blocks whose length stayed unknown in part."""


@dataclass
class _Pending:
    """A trimmed block with drafts still to settle."""

    position: int
    """Of the first of them."""
    draft_ids: list[int]
    draft_probs: list[float]
    """Empty where the token decides."""
    reached: float = 1.0
    """Probability that every draft so far is accepted."""


class BlockAcceptEstimator(Generic[Row]):
    """Sums over rounds; keeps the trimmed drafts of each row until they are settled."""

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._num_blocks = self._num_open = 0
        self._pending: dict[Row, list[_Pending]] = {}

    def observe(self, key: Row, round_: BlockRound) -> None:
        """Takes in the next round of row `key` in which it was drafted or emitted anything.

        Raises ValueError if a rejection row comes without target probabilities.
        """
        pending = self._pending.pop(key, [])
        if round_.draft_ids:
            self._num_blocks += 1
            self._add(1 + round_.num_accepted)
            is_trimmed = round_.num_accepted == round_.verify_len < len(round_.draft_ids)
            if is_trimmed and len(round_.committed_ids) > round_.num_accepted:
                rest = slice(round_.verify_len, None)
                first = round_.position + 1 + round_.verify_len
                drafts, probs = list(round_.draft_ids[rest]), list(round_.draft_probs[rest])
                pending = [*pending, _Pending(first, drafts, probs)]
        if left := [block for block in pending if self._settle(block, round_)]:
            self._pending[key] = left

    def observe_rejected(self, num_accepted: int) -> None:
        """Takes in a round of a row with nothing to settle, which rejected a draft of its window: all is known."""
        self._num_blocks += 1
        self._add(1 + num_accepted)

    @property
    def waiting(self) -> Collection[Row]:
        """Rows with drafts still to settle."""
        return self._pending.keys()

    def wanted(self, key: Row, position: int, draft_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Positions and tokens of which a rejection row needs the target probability, if its next round has its anchor
        at `position` and verifies `draft_ids`. Nothing is wanted where the texts could not agree any more."""
        pairs: dict[tuple[int, int], None] = {}
        for block in self._pending.get(key, ()):
            for k in range(len(draft_ids) + 1 if block.draft_probs else 0):
                offset = position + 1 + k - block.position
                if not 0 <= offset < len(block.draft_ids):
                    break
                pairs[position + 1 + k, block.draft_ids[offset]] = None
                if k < len(draft_ids) and draft_ids[k] != block.draft_ids[offset]:
                    break
        return list(pairs)

    def finish(self, key: Row) -> None:
        """The row's text has ended: what is not settled stays unknown."""
        for block in self._pending.pop(key, []):
            self._leave_open(block)

    def interval(self) -> Interval:
        """Over the blocks seen so far; those still to be settled count as unknown from here on."""
        waiting = [block for blocks in self._pending.values() for block in blocks]
        high = self._high + sum(block.reached * len(block.draft_ids) for block in waiting)
        count = max(1, self._num_blocks)
        return Interval(self._low / count, high / count, self._num_blocks, self._num_open + len(waiting))

    def _settle(self, block: _Pending, round_: BlockRound) -> bool:
        """Settles drafts at the positions this round committed; whether some are left."""
        while block.draft_ids:
            offset = block.position - round_.position - 1
            if offset >= len(round_.committed_ids):
                return True
            draft_id, token_id = block.draft_ids[0], round_.committed_ids[offset]
            if block.draft_probs:
                if round_.target_prob is None:
                    raise ValueError("a rejection row's drafts are settled by target probabilities, none were given")
                draft_prob = block.draft_probs.pop(0)
                chance = round_.target_prob(block.position, draft_id) / draft_prob if draft_prob else math.nan
                if math.isnan(chance):
                    self._leave_open(block)
                    return False
                block.reached *= min(1.0, chance)
            else:
                block.reached *= float(draft_id == token_id)
            block.draft_ids.pop(0)
            self._add(block.reached)
            block.position += 1
            if draft_id != token_id:
                self._leave_open(block)
                return False
        return False

    def _leave_open(self, block: _Pending) -> None:
        unknown = block.reached * len(block.draft_ids)
        self._high += unknown
        self._num_open += unknown > 0.0

    def _add(self, accepted: float) -> None:
        self._low += accepted
        self._high += accepted
