"""Rows with a form are distributed as plain masked decoding, though the drafter knows nothing of masks.

The rig and the statistic are those of `test_acceptance_distribution`: a target of five tokens, a drafter that knows
three of them, windows that are trimmed and drafted again. Masks come from the scheduler's own arena, with drafts in
it, and go through the verifier's kernels; what they allow is written out by hand. Draft distributions that are
masked as well, and windows that end before a forbidden draft, must be rejected by the same statistic.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from tiny_tokenizer import masked_row, regex_grammar
from unit.test_acceptance_distribution import (
    ANCHOR_ID,
    ANCHOR_POSITION,
    BLOCK_SIZE,
    NORMAL_QUANTILE,
    NUM_REQUESTS,
    NUM_TOKENS,
    TARGET_LOGITS,
    VOCAB_SIZE,
    Draft,
    Rules,
    full_length,
    generate,
    lagged_length,
    no_length,
)

from kernels.rejection_sample import RowOutcome
from kernels.rejection_sample.cpu import accept_row
from kernels.sampling import Regime, SlotSampling
from kernels.target_probs import reference
from kernels.token_masks.cpu import mask_logits
from scheduler_service.grammar.token_masks import TokenMasks
from service_kit.handoff import Arena

TOKENS = "abcde"
REGEX = "(ab?|c[de]|d(a|bb)|e)*"
"""Texts without end: behind `c` only `d` and `e`, behind `d` only `a` and `b`, no `b` but behind `a` or `d`."""
SESSION = 5
REJECTION = SlotSampling(Regime.REJECTION, temperature=1.0)
FILTERED = SlotSampling(Regime.REJECTION, temperature=1.3, top_p=0.8)
COUPLED = SlotSampling(Regime.COUPLED, temperature=1.0)


@cache
def allowed(text: str) -> tuple[int, ...]:
    """Tokens after `text` that a text of the form may go on with."""
    ends = ["".join(each) for n in range(3) for each in itertools.product(TOKENS, repeat=n)]
    found = [i for i, token in enumerate(TOKENS) if any(re.fullmatch(REGEX, text + token + end) for end in ends)]
    return tuple(found)


class MaskArena(NamedTuple):
    masks: TokenMasks
    reader: Arena


class MaskedAcceptance:
    """What scheduler and verifier do with a window of a masked slot, for many requests: told apart by their keys."""

    def __init__(self, arena: MaskArena, fault: str = "") -> None:
        self._arena, self._fault = arena, fault
        self._grammar = regex_grammar(TOKENS, REGEX, VOCAB_SIZE + 1)
        self._texts: dict[int, tuple[int, ...]] = {}
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], npt.NDArray[np.uint32]] = {}

    def masks_of(self, text: tuple[int, ...], drafts: tuple[int, ...]) -> npt.NDArray[np.uint32]:
        """By the arena; each pair is computed once."""
        if (text, drafts) not in self._known:
            row = masked_row(self._grammar, text, drafts, slot=0, start=3)
            assert self._arena.masks.fill(1, [row]) == {}
            self._known[text, drafts] = self._arena.reader.rows[0, : len(drafts) + 1].copy()
        return self._known[text, drafts]

    def __call__(
        self,
        logits: npt.NDArray[np.float32],
        draft_ids: npt.NDArray[np.uint32],
        draft_probs: npt.NDArray[np.float32],
        draft_to_target: npt.NDArray[np.uint32],
        sampling: SlotSampling,
        position: int,
        round_: int,
    ) -> RowOutcome:
        text = self._texts.get(sampling.key, ())
        assert position == ANCHOR_POSITION + len(text)
        drafts = tuple(draft_ids.tolist())
        if self._fault == "cuts":  # the window ends before a draft that is forbidden
            end = ""
            for k, token_id in enumerate(drafts):
                if token_id not in allowed("".join(TOKENS[i] for i in text) + end):
                    logits, draft_ids, draft_probs = logits[: k + 1], draft_ids[:k], draft_probs[:k]
                    break
                end += TOKENS[token_id]
        masked, masks = logits.copy(), self.masks_of(text, drafts)[: len(logits)]
        mask_logits(masked, masks)
        if self._fault == "masked draft":  # not what the drafts were drawn from
            is_allowed = np.isfinite(masked)[: len(draft_ids), draft_to_target]
            draft_probs = np.where(is_allowed, draft_probs, np.float32(0.0)) + np.float32(1e-30)
        outcome = accept_row(masked, draft_ids, draft_probs, draft_to_target, sampling, position, round_)
        self._texts[sampling.key] = (*text, *outcome.token_ids)
        return outcome


@pytest.fixture
def arena() -> Iterator[MaskArena]:
    masks = TokenMasks(SESSION, 1, BLOCK_SIZE, VOCAB_SIZE + 1)
    reader = Arena.attach(masks.name, session=SESSION)
    yield MaskArena(masks, reader)
    reader.close()
    masks.close()


def chi_square_excess(samples: list[list[int]], sampling: SlotSampling) -> float:
    """Pearson's statistic over the enumerated texts, divided by its critical value at significance 1e-4."""
    counts = dict.fromkeys(itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS), 0)
    for tokens in samples:
        counts[tuple(tokens)] += 1
    expected = np.full(len(counts), float(len(samples)))
    for index, path in enumerate(counts):
        text, last = "", ANCHOR_ID
        for token_id in path:
            logits = np.full(VOCAB_SIZE, -np.inf, np.float32)
            ids = list(allowed(text))
            if token_id not in ids:
                expected[index] = 0.0
                break
            logits[ids] = TARGET_LOGITS[last, ids]
            expected[index] *= reference.target_probs(logits[None], sampling)[0, token_id]
            text, last = text + TOKENS[token_id], token_id
    observed = np.array(list(counts.values()))
    if observed[expected == 0.0].any():
        return float(np.inf)
    is_rare = expected < 5.0
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    keep = expected > 0.0
    freedom = int(keep.sum()) - 1
    spread = 2.0 / (9.0 * freedom)
    statistic = float((((observed - expected)[keep]) ** 2 / expected[keep]).sum())
    return statistic / (freedom * (1.0 - spread + NORMAL_QUANTILE * spread**0.5) ** 3)


@pytest.mark.parametrize("sampling", [REJECTION, FILTERED], ids=["whole", "top-p"])
def test_sampled_rows_follow_the_masked_target(arena: MaskArena, sampling: SlotSampling) -> None:
    rules = Rules(accept=MaskedAcceptance(arena), length=lagged_length)
    assert chi_square_excess(generate(range(NUM_REQUESTS), sampling, rules), sampling) < 1.0


@pytest.mark.parametrize("fault", ["masked draft", "cuts"])
def test_the_statistic_rejects_masks_that_are_used_wrongly(arena: MaskArena, fault: str) -> None:
    rules = Rules(accept=MaskedAcceptance(arena, fault), length=full_length)
    assert chi_square_excess(generate(range(NUM_REQUESTS), REJECTION, rules), REJECTION) > 1.0


def test_seeded_rows_have_the_text_of_plain_decoding(arena: MaskArena) -> None:
    def varying_length(draft: Draft, older: Draft | None) -> int:
        return draft.position % (BLOCK_SIZE + 1)

    texts = [
        generate(range(300), COUPLED, Rules(accept=MaskedAcceptance(arena), length=length))
        for length in (no_length, full_length, varying_length)
    ]
    assert texts[0] == texts[1] == texts[2]
    for text in texts[0]:
        for k, token_id in enumerate(text):
            assert token_id in allowed("".join(TOKENS[i] for i in text[:k]))
