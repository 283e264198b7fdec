"""Exclusive use of an executor's engine, and the answer to repeated calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from service_kit.errors import SessionMismatchError

T = TypeVar("T")

_NUM_REPLIES = 2
"""Calls that may be in flight at once: a step, and the one chained to it."""


class EngineThread:
    """One piece of tensor work at a time: the calls of steps on the threads that received them, which saves two
    wake-ups a call, everything else (loading, sessions, profiles) on a thread kept for it."""

    def __init__(self, name: str) -> None:
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                future.set_result(self.run(work))
            except BaseException as error:  # handed to the waiting caller; the thread itself never dies
                future.set_exception(error)

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` on the calling thread, once the engine is free."""
        with self._turn:
            return work()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Enqueues `work` for the engine's own thread; the future carries its result or exception."""
        future: Future[T] = Future()
        self._queue.put((work, future))
        return future

    def stop(self) -> None:
        """Ends the thread after the work already queued."""
        self._queue.put(None)
        self._thread.join()


class StepReplies(Generic[T]):
    """Makes calls with growing ids safe to repeat: the last two are answered from their replies, or joined while they
    run. Two, because a caller that lost its connection may have had two calls in flight; it repeats them in order."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._replies: dict[int, Future[T]] = {}

    def call(self, step_id: int, work: Callable[[], T], wait: Callable[[], None] | None = None) -> T:
        """Runs `work` once for `step_id`, after `wait`, during which the engine is free for others.

        Raises SessionMismatchError for an unknown id that is not a new one.
        """
        with self._lock:
            reply, newest = self._replies.get(step_id), max(self._replies, default=0)
            is_new = reply is None
            if reply is None:
                if step_id <= newest:
                    raise SessionMismatchError(f"step {step_id} is older than step {newest}")
                reply = self._replies[step_id] = Future()
                for old in sorted(self._replies)[:-_NUM_REPLIES]:
                    del self._replies[old]
        if is_new:
            try:
                if wait is not None:
                    wait()
                reply.set_result(self._engine.run(work))
            except BaseException as error:
                reply.set_exception(error)
        return reply.result()
