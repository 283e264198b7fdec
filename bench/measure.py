"""Runs groups of requests against one server and reads the scheduler's counters around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from dspark.v1 import scheduler_pb2, scheduler_pb2_grpc

from bench.prompts import ALL, Prompt
from launcher.client import Answer, Client, new_answer
from service_kit.rpc import socket_address

COUNTERS = (
    "num_steps",
    "num_committed",
    "num_drafted",
    "num_verified",
    "num_accepted",
    "num_uncut_accepted",
    "num_verify_rows",
    "num_drafted_steps",
    "step_ns",
    "draft_call_ns",
    "step_call_ns",
    "drafter_model_ns",
    "verifier_model_ns",
    "verifier_accept_ns",
    "num_preemptions",
    "num_prefill_tokens",
    "num_prefix_cache_hits",
    "predicted_gain_ns",
    "measured_gain_ns",
    "num_decode_steps",
    "num_decode_committed",
    "decode_step_ns",
    "decode_draft_call_ns",
    "decode_step_call_ns",
)
"""Fields of GetLoad that add up."""


@dataclass(frozen=True)
class GroupResult:
    """Requests that ran together on one engine."""

    mode: str
    prompt_class: str
    """Of all its prompts; ALL where they are of several."""
    concurrency: int
    answers: tuple[Answer, ...]
    wall_s: float
    counters: dict[str, int]
    """Growth of COUNTERS; empty for an engine that has none."""
    prompts: tuple[Prompt, ...] = ()
    """One an answer; empty where they do not matter."""

    @property
    def answer_classes(self) -> tuple[str, ...]:
        """Class of each answer's prompt."""
        return tuple(each.prompt_class for each in self.prompts) or (self.prompt_class,) * len(self.answers)

    def has_class(self, name: str) -> bool:
        """Whether an answer counts towards rows of class `name`."""
        return name == ALL or name in self.answer_classes

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the wall time of the group, prefill included."""
        return sum(answer.num_tokens for answer in self.answers) / self.wall_s


class Engine:
    """One running server, in one verify mode."""

    def __init__(self, mode: str, url: str, run_dir: Path, *, drafts: bool = True) -> None:
        """Connects to a server that is ready. `drafts`: whether its requests allow drafts."""
        self.mode = mode
        self._asked: dict[str, Any] = {} if drafts else {"speculation": {"enabled": False}}
        self._client = Client(url)
        self._channel = grpc.insecure_channel(socket_address(run_dir, "scheduler"))
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def load(self) -> scheduler_pb2.GetLoadResponse:
        """Gauges and counters now."""
        reply: scheduler_pb2.GetLoadResponse = self._scheduler.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=10)
        return reply

    def run_group(
        self,
        prompts: Sequence[Prompt],
        concurrency: int,
        parameters: dict[str, Any],
        on_answer: Callable[[], None] = lambda: None,
    ) -> GroupResult:
        """Asks all prompts, `concurrency` at a time, and waits for all answers. Raises ServerError.

        `on_answer` is called after each answer, on a thread of its own; what it raises ends the group.
        """

        def ask(prompt: Prompt) -> Answer:
            answer = self._ask(prompt, parameters)
            on_answer()
            return answer

        before, started = self.load(), time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            answers = tuple(pool.map(ask, prompts))
        ended = max(answer.last_token or started for answer in answers)
        after = self._settled()
        counters = {name: int(getattr(after, name) - getattr(before, name)) for name in COUNTERS}
        wall_s = max(ended - started, 1e-9)
        classes = {prompt.prompt_class for prompt in prompts}
        name = classes.pop() if len(classes) == 1 else ALL
        return GroupResult(self.mode, name, concurrency, answers, wall_s, counters, tuple(prompts))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
        self._channel.close()

    def _ask(self, prompt: Prompt, parameters: dict[str, Any]) -> Answer:
        answer = new_answer()
        for _ in self._client.chat([{"role": "user", "content": prompt.text}], answer, **parameters, **self._asked):
            pass
        return answer

    def _settled(self) -> scheduler_pb2.GetLoadResponse:
        """Counters once the engine is idle: the last step ends a little after its tokens arrive."""
        deadline = time.monotonic() + 5.0
        while (load := self.load()).num_running and time.monotonic() < deadline:
            time.sleep(0.005)
        return load
