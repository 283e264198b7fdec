"""llguidance tokenizers over a handful of texts, and answers that follow a grammar on them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from scheduler_service.grammar.matcher import Grammar
from scheduler_service.step_plan import PlannedRow


class _Words:
    """What llguidance reads of a tokenizer: each of `tokens`, then the end of the answer, then special ones."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[str], vocab_size: int) -> None:
        self.eos_token_id = len(tokens)
        self.special_token_ids = range(len(tokens), vocab_size)
        self.tokens = [*(token.encode() for token in tokens), *(b"<%d>" % i for i in self.special_token_ids)]

    def __call__(self, text: bytes | str) -> list[int]:
        """Byte by byte; masks do not depend on it."""
        data = text.encode() if isinstance(text, str) else text
        return [self.tokens.index(bytes([byte])) for byte in data if bytes([byte]) in self.tokens]


def tiny_tokenizer(tokens: Sequence[str], vocab_size: int) -> LLTokenizer:
    """Token i is `tokens[i]`, the one behind them ends an answer; a head of `vocab_size` rows has more than that."""
    return LLTokenizer(TokenizerWrapper(_Words(tokens, vocab_size)))


def regex_grammar(tokens: Sequence[str], regex: str, vocab_size: int) -> Grammar:
    """Texts that the expression matches."""
    return Grammar(tiny_tokenizer(tokens, vocab_size), LLMatcher.grammar_from_regex(regex))


def masked_row(
    grammar: Grammar, text_ids: Sequence[int], drafts: Sequence[int], *, slot: int, start: int
) -> PlannedRow:
    """The decode row of an answer that stands at `text_ids`."""
    matcher = grammar.matcher()
    matcher.advance(text_ids)
    sequence = SimpleNamespace(matcher=matcher, slot=slot)
    return PlannedRow(sequence, start, 1, emits=True, drafts=list(drafts))  # type: ignore[arg-type]
