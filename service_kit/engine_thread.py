"""One thread for all tensor work of an executor, and the answer to repeated calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from service_kit.errors import SessionMismatchError

T = TypeVar("T")


class EngineThread:
    """Runs callables one at a time on one thread (a second calling thread would build a second OpenMP pool)."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # handed to the waiting caller; the thread itself never dies
                future.set_exception(error)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Enqueues `work`; the future carries its result or exception."""
        future: Future[T] = Future()
        self._queue.put((work, future))
        return future

    def stop(self) -> None:
        """Ends the thread after the work already queued."""
        self._queue.put(None)
        self._thread.join()


class StepReplies(Generic[T]):
    """Makes a call with a growing step id safe to repeat: a known id gets the last reply, a running one is joined."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._last_id = 0
        self._last: Future[T] | None = None

    def reset(self) -> None:
        """Forgets the last reply (a new session)."""
        with self._lock:
            self._last_id, self._last = 0, None

    def call(self, step_id: int, work: Callable[[], T]) -> T:
        """Runs `work` once for `step_id`. Raises SessionMismatchError for an id older than the last one."""
        with self._lock:
            if step_id < self._last_id or step_id == 0:
                raise SessionMismatchError(f"step {step_id} is older than step {self._last_id}")
            if step_id > self._last_id or self._last is None:
                self._last_id, self._last = step_id, self._engine.submit(work)
            future = self._last
        return future.result()
