"""A peer in a process of its own, stopped by the kernel while others are measured."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import GroupResult
from launcher.client import Answer

_STOP_S = 10.0


class PeerError(Exception):
    """A peer did not start, did not answer in time, or answered wrongly. The text names it and its log."""


class PeerPrompt(NamedTuple):
    """A prompt as text (one user turn) and as the tokens of the rendered chat."""

    prompt_class: str
    text: str
    token_ids: tuple[int, ...]


class Worker:
    """One running peer. See engines.py for what is said over its standard input and output."""

    def __init__(self, name: str, command: Sequence[str], log_path: Path, *, start_s: float, answer_s: float) -> None:
        """Starts it and waits until it is ready, at most `start_s` seconds. Raises PeerError."""
        self.name, self._log_path, self._answer_s = name, log_path, answer_s
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.facts: dict[str, Any] = self._receive(start_s)["ready"]
        except (PeerError, KeyError):
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run_group(self, prompts: Sequence[PeerPrompt], concurrency: int, max_tokens: int) -> GroupResult:
        """Answers all prompts together; the process runs only during this call. Raises PeerError."""
        self._signal(signal.SIGCONT)
        try:
            self._send({"prompts": [prompt.token_ids for prompt in prompts], "max_tokens": max_tokens})
            answers = tuple(map(_answer, self._receive(self._answer_s)["answers"], prompts))
        finally:
            self._signal(signal.SIGSTOP)
        if wrong := [answer.num_tokens for answer in answers if answer.num_tokens != max_tokens]:
            raise PeerError(f"{self.name}: an answer of {wrong[0]} tokens, not {max_tokens}")
        wall_s = max(answer.last_token or 0.0 for answer in answers)
        return GroupResult(self.name, prompts[0].prompt_class, concurrency, answers, wall_s, {})

    def close(self) -> None:
        """Ends the process and those it started."""
        self._signal(signal.SIGCONT)
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"{self.name} has ended: see {self._log_path}") from error

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise PeerError(f"{self.name}: no answer within {seconds:.0f} s, see {self._log_path}") from None
        if line is None:
            raise PeerError(f"{self.name} has ended: see {self._log_path}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise PeerError(f"{self.name}: {message['error']}")
        return message

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # a library may print lines of its own
                self._lines.put(line)
        self._process.stdout.close()
        self._lines.put(None)


def _answer(reply: dict[str, Any], prompt: PeerPrompt) -> Answer:
    return Answer(
        started=0.0,
        token_ids=reply["token_ids"],
        finish_reason="length",
        first_token=reply["first_s"],
        last_token=reply["last_s"],
        num_prompt_tokens=len(prompt.token_ids),
        num_tokens=len(reply["token_ids"]),
    )
