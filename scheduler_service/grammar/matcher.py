"""A compiled form, and where one answer stands in it."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""llguidance's own bounds of work and memory (a lexer state is 1 to 2 KB), as far as it keeps them: see `check`."""
_MAX_REASON = 400
"""Characters of an error of llguidance that are told."""


class MatcherError(RuntimeError):
    """An answer that its matcher cannot follow any more: its request ends, the others go on."""


class Grammar:
    """A compiled form; shared by all answers that must have it."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """Compiles. Raises MatcherError saying why it cannot be."""
        self._start = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        _raise_error(self._start)

    def matcher(self) -> AnswerMatcher:
        """A matcher at the beginning of an answer."""
        return AnswerMatcher(self._start.deep_copy())


class AnswerMatcher:
    """Where one answer stands. Rolled back never: it sees committed tokens alone."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.state = matcher
        """llguidance's matcher, for masks to be computed of."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in committed tokens. Raises MatcherError."""
        self.state.consume_tokens(list(token_ids))
        self.raise_error()

    def raise_error(self) -> None:
        """Raises MatcherError if anything has gone wrong; llguidance's matchers never recover from that."""
        _raise_error(self.state)


def _raise_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise MatcherError(reason_of(matcher.get_error()))


def reason_of(error: str) -> str:
    """llguidance's words, without its marks."""
    words = error.replace("<non-verbose/>", "").strip()
    return words if len(words) <= _MAX_REASON else f"{words[:_MAX_REASON]} ..."
