"""Masks of answers and of their drafts: against languages that are written out, text by text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from tiny_tokenizer import masked_row, regex_grammar

from scheduler_service.grammar.matcher import MatcherError
from scheduler_service.grammar.token_masks import TokenMasks
from service_kit.handoff import Arena

TOKENS = ("a", "b", "c", "ab", "bc", "cab", "aa")
END = len(TOKENS)
VOCAB_SIZE = 40  # ids behind the tokenizer's are rows of the head that mean nothing
LANGUAGES = ("(a|bc){1,3}", "a*b?c{2}", "(ab|c)*a?", "abc", "(aa|b(ca)*)+")
MAX_LENGTH = 8
SESSION, BLOCK_SIZE, SLOT = 77, 3, 1


def language(regex: str) -> list[str]:
    """Its texts, as far as they matter to prefixes of half their length."""
    texts = ("".join(each) for n in range(MAX_LENGTH + 1) for each in itertools.product("abc", repeat=n))
    return [text for text in texts if re.fullmatch(regex, text)]


def allowed(texts: list[str], text: str) -> set[int]:
    """Tokens after `text`, by the language written out."""
    found = {i for i, token in enumerate(TOKENS) if any(each.startswith(text + token) for each in texts)}
    return found | ({END} if text in texts else set())


def bits(mask: npt.NDArray[np.uint32]) -> set[int]:
    return {i for i in range(VOCAB_SIZE) if int(mask[i // 32]) >> (i % 32) & 1}


@pytest.fixture
def masks() -> Iterator[TokenMasks]:
    masks = TokenMasks(SESSION, 2, BLOCK_SIZE, VOCAB_SIZE)
    yield masks
    masks.close()


@pytest.mark.parametrize("regex", LANGUAGES)
def test_masks_are_those_of_the_language_up_to_the_first_forbidden_draft(masks: TokenMasks, regex: str) -> None:
    texts, grammar = language(regex), regex_grammar(TOKENS, regex, VOCAB_SIZE)
    reader = Arena.attach(masks.name, session=SESSION)
    rng = np.random.default_rng(3)
    num_judged = [0] * (BLOCK_SIZE + 1)
    for step_id in range(150):
        answer, answer_ids = "", []
        for _ in range(int(rng.integers(3))):  # a prefix that the language has
            choices = sorted(allowed(texts, answer) - {END})
            if choices:
                answer_ids.append(int(rng.choice(choices)))
                answer += TOKENS[answer_ids[-1]]
        drafts, probe = [], answer
        for _ in range(int(rng.integers(BLOCK_SIZE + 1))):  # most of them allowed, some not, some the end
            choices = sorted(allowed(texts, probe)) if rng.random() < 0.8 else list(range(END + 1))
            drafts.append(int(rng.choice(choices)) if choices else 0)
            probe += TOKENS[drafts[-1]] if drafts[-1] != END else "!"
        row = masked_row(grammar, answer_ids, drafts, slot=SLOT, start=9)
        masks.fill(0, [row])
        reader.rows[:] = 0  # what is left of earlier steps must not matter
        assert masks.fill(step_id, [row]) == {}
        assert reader.stamps[SLOT].tolist() == [SESSION, step_id, SLOT, 10]
        is_judged = True
        for k in range(len(drafts) + 1):
            mask = reader.rows[SLOT, k]
            if not is_judged:
                assert mask.any()  # the verifier must find a distribution, though nothing of it counts
                continue
            expected, found = allowed(texts, answer), bits(mask)
            if len(answer) <= MAX_LENGTH - 4:
                # Where one text alone can follow, llguidance keeps to the tokenizer's own tokens of it.
                is_forced = END not in expected and len({TOKENS[i][0] for i in expected}) == 1
                assert found == expected or (is_forced and found and found < expected), (answer, k)
                num_judged[k] += 1
            if k < len(drafts):
                is_judged = drafts[k] in found and drafts[k] != END
                answer += TOKENS[drafts[k]] if is_judged else ""
        matcher = row.sequence.matcher
        assert matcher is not None
        before = bits(np.frombuffer(matcher.state.compute_bitmask(), np.uint32).copy())
        assert before == bits(reader.rows[SLOT, 0]) & set(range(END + 1)), "drafts have moved the matcher"
    assert min(num_judged[:2]) > 20, num_judged
    reader.close()


def test_several_rows_have_masks_of_their_own(masks: TokenMasks) -> None:
    grammar = regex_grammar(TOKENS, "(ab|c)*", VOCAB_SIZE)
    rows = [masked_row(grammar, [], [3, 2], slot=0, start=4), masked_row(grammar, [0], [], slot=1, start=7)]
    assert masks.fill(5, rows) == {}
    reader = Arena.attach(masks.name, session=SESSION)
    assert [bits(mask) for mask in reader.rows[0, :3]] == [{0, 2, 3, 5, END}] * 3
    assert bits(reader.rows[1, 0]) == {1, 4}
    assert reader.stamps.tolist() == [[SESSION, 5, 0, 5], [SESSION, 5, 1, 8]]
    reader.close()


def test_a_broken_matcher_fails_alone(masks: TokenMasks) -> None:
    grammar = regex_grammar(TOKENS, "abc", VOCAB_SIZE)
    broken, whole = masked_row(grammar, [], [1], slot=0, start=4), masked_row(grammar, [], [0], slot=1, start=4)
    assert broken.sequence.matcher is not None
    with pytest.raises(MatcherError):
        broken.sequence.matcher.advance([1])
    failed = masks.fill(5, [broken, whole])
    assert list(failed) == [0]
    assert str(failed[0])
    reader = Arena.attach(masks.name, session=SESSION)
    assert reader.stamps[0].tolist() == [0, 0, 0, 0]
    assert bits(reader.rows[1, 0]) == {0}
    reader.close()
