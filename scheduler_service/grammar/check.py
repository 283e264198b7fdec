"""Compiles grammars where that can do no harm: `python -m scheduler_service.grammar.check SECONDS MEGABYTES`.

llguidance bounds its work by counts that some grammars get around: a few hundred bytes (patterns that must all match)
can take minutes and gigabytes, in native code that no thread can be told to leave. So this process compiles first: a
timer and a memory limit end it, and only what passed is compiled by the scheduler itself.

Input, one JSON value a line: first {"tokenizer", "vocab_size", "eos_token_ids"}, then grammars. Each is answered by a
line: the error as a JSON string, empty if there is none.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from llguidance import LLTokenizer

from scheduler_service.grammar.matcher import Grammar, MatcherError


def load_tokenizer(file: Path, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """The target's tokenizer, for a head of `vocab_size` rows. Raises OSError or ValueError in words."""
    return LLTokenizer(file.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=eos_token_ids)


def main() -> None:
    """Answers until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler's matter; this process ends with its input
    timeout_s, max_mbytes = float(sys.argv[1]), int(sys.argv[2])
    given = json.loads(sys.stdin.readline())
    tokenizer = load_tokenizer(Path(given["tokenizer"]), given["vocab_size"], given["eos_token_ids"])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + max_mbytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, timeout_s)  # of computing; its signal ends this process
        try:
            matcher = Grammar(tokenizer, json.loads(line)).matcher()
            matcher.state.compute_bitmask()
            matcher.raise_error()
            error = ""
        except MatcherError as problem:
            error = str(problem)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
