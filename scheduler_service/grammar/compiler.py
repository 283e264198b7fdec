"""Compiles forms on a thread of its own, within bounds of size, time, memory and number, and keeps what it compiled."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from scheduler_service.grammar.check import load_tokenizer
from scheduler_service.grammar.form import StructuredOutput, refusal
from scheduler_service.grammar.matcher import Grammar, MatcherError
from service_kit.errors import QueueFullError

_MAX_PENDING = 32
"""Forms that may wait to be compiled."""
_MAX_KEPT = 64
"""Compiled forms that are kept."""
_CHECK_MBYTES = 512
"""Memory that compiling one form may take."""


@dataclass(frozen=True)
class GrammarOptions:
    """What forms are compiled for, and their bounds."""

    tokenizer: Path
    """tokenizer.json of the target."""
    vocab_size: int
    """Rows of the target's head; at least the tokenizer's tokens."""
    eos_token_ids: tuple[int, ...]
    max_bytes: int
    timeout_s: float


class GrammarCompiler:
    """Forms to grammars. Thread-safe. Nothing is loaded before the first form."""

    def __init__(self, options: GrammarOptions) -> None:
        """Costs nothing."""
        self._options = options
        self._worker = ThreadPoolExecutor(1, "grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._num_pending = 0
        self._tokenizer: LLTokenizer | None = None
        self._check: subprocess.Popen[str] | None = None

    def compile(self, form: StructuredOutput) -> Future[Grammar]:
        """The compiled form, at once if it is known. A future that is cancelled while it waits is forgotten.

        Raises QueueFullError; the future raises InvalidRequestError saying why the form cannot be had.
        """
        if (known := self._known(form)) is not None:
            done: Future[Grammar] = Future()
            done.set_result(known)
            return done
        with self._lock:
            if self._num_pending >= _MAX_PENDING:
                raise QueueFullError(f"{_MAX_PENDING} structured outputs wait to be compiled: try again later")
            self._num_pending += 1
        future = self._worker.submit(self._compile, form)
        future.add_done_callback(self._count_done)
        return future

    def close(self) -> None:
        """Drops what waits; a form in work ends soon, with an error."""
        if (process := self._check) is not None:
            process.kill()
        self._worker.shutdown(cancel_futures=True)
        if self._check is not None:
            self._check.kill()
            self._end_check()

    def _count_done(self, _: Future[Grammar]) -> None:
        with self._lock:
            self._num_pending -= 1

    def _known(self, form: StructuredOutput) -> Grammar | None:
        with self._lock:
            if form in self._kept:
                self._kept.move_to_end(form)
            return self._kept.get(form)

    def _compile(self, form: StructuredOutput) -> Grammar:
        """Runs on the worker."""
        if (known := self._known(form)) is not None:
            return known
        text = form.to_grammar(self._options.max_bytes)
        check = self._check = self._check or self._start_check()
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        if error := self._error_of(text, check):
            raise refusal(f"{form.kind}: {error}")
        try:
            grammar = Grammar(self._tokenizer, text)
        except MatcherError as problem:
            raise refusal(f"{form.kind}: {problem}") from problem
        with self._lock:
            self._kept[form] = grammar
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _load_tokenizer(self) -> LLTokenizer:
        options = self._options
        try:
            return load_tokenizer(options.tokenizer, options.vocab_size, list(options.eos_token_ids))
        except (OSError, ValueError) as error:
            raise refusal(f"impossible here, as the target's tokenizer.json cannot be used: {error}") from error

    def _error_of(self, grammar: str, process: subprocess.Popen[str]) -> str:
        """What is wrong with a grammar, by the check process; empty if nothing is."""
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with contextlib.suppress(OSError):  # it has died: told below
            print(json.dumps(grammar), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        if answer:
            return str(json.loads(answer))
        if self._end_check() == -signal.SIGPROF:
            limit = f"{self._options.timeout_s:g} s of DSPARK_SCHEDULER_GRAMMAR_TIMEOUT_S"
            return f"takes longer to compile than the {limit}: make it simpler"
        return f"cannot be compiled in {_CHECK_MBYTES} MB of memory: make it simpler"

    def _end_check(self) -> int:
        """Takes leave of a check process that dies; returns its exit status."""
        process, self._check = self._check, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return process.wait()

    def _start_check(self) -> subprocess.Popen[str]:
        options = self._options
        command = [sys.executable, "-m", "scheduler_service.grammar.check", str(options.timeout_s), str(_CHECK_MBYTES)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        given = {
            "tokenizer": str(options.tokenizer),
            "vocab_size": options.vocab_size,
            "eos_token_ids": options.eos_token_ids,
        }
        print(json.dumps(given), file=process.stdin, flush=True)
        return process
