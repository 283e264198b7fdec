"""What a scheduler needs for structured output, where its target allows it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from scheduler_service.admission import Limits
from scheduler_service.executor_types import SessionSizes
from scheduler_service.grammar.compiler import GrammarCompiler, GrammarOptions
from scheduler_service.grammar.token_masks import TokenMasks
from scheduler_service.settings import SchedulerSettings
from service_kit.errors import ConfigurationError

_FILE = "tokenizer.json"


class Structure(NamedTuple):
    """Forms and masks of one scheduler."""

    compiler: GrammarCompiler
    masks: TokenMasks

    def close(self) -> None:
        """Ends the compiler's processes and gives back shared memory. Call when no step runs."""
        self.compiler.close()
        self.masks.close()


def structure_off_reason(tokenizer: Path | None, limits: Limits) -> str:
    """Why structured output is impossible, in words; empty if nothing is known against it."""
    if tokenizer is None:
        return "structured output is off: the scheduler has no tokenizer (DSPARK_SCHEDULER_TOKENIZER)"
    if not (tokenizer / _FILE).is_file():
        return f"structured output is off: the target has no {_FILE}"
    if not limits.eos_token_ids:
        return "structured output is off: the target's configuration names no end-of-sequence token"
    return ""


def create_masks(sizes: SessionSizes, vocab_size: int) -> TokenMasks:
    """The masks arena of a session. Raises ConfigurationError if shared memory cannot hold it."""
    try:
        return TokenMasks(sizes.session, sizes.num_slots, sizes.max_draft_tokens, vocab_size)
    except OSError as error:
        raise ConfigurationError(str(error), field="max_num_seqs") from error


def create_structure(settings: SchedulerSettings, limits: Limits, masks: TokenMasks) -> Structure:
    """Call only where `structure_off_reason` is empty."""
    assert settings.tokenizer is not None
    options = GrammarOptions(
        settings.tokenizer / _FILE,
        limits.vocab_size,
        tuple(sorted(limits.eos_token_ids)),
        settings.max_grammar_bytes,
        settings.grammar_timeout_s,
    )
    return Structure(GrammarCompiler(options), masks)
