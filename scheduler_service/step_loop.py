"""The thread that runs steps while there is work and sleeps while there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from scheduler_service.batch import Batch
from scheduler_service.commit import Committer
from scheduler_service.request import Delivery, FinishReason, Request
from scheduler_service.step import StepEngine
from service_kit.errors import UnavailableError

log = logging.getLogger(__name__)


class StepLoop:
    """Owns the step thread. All state of requests is touched on it alone; others post commands."""

    def __init__(
        self,
        batch: Batch,
        committer: Committer,
        deliver: Callable[[list[Delivery]], None],
        on_admit: Callable[[Request], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`deliver` is handed the events of a step; `on_failure` the reason when the loop cannot go on."""
        self._batch, self._committer = batch, committer
        self._deliver, self._on_admit, self._on_failure = deliver, on_admit, on_failure
        self._condition = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def start(self, engine: StepEngine) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, args=(engine,), name="step-loop", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Runs `command` on the step thread before its next step. Raises UnavailableError once the loop has ended."""
        with self._condition:
            if self._is_stopping:
                raise UnavailableError("the scheduler has stopped")
            self._commands.append(command)
            self._condition.notify()

    def stop(self) -> None:
        """Ends the thread after the step in flight. Harmless if it has ended."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def flush(self) -> None:
        """Delivers the events gathered so far."""
        if events := self._committer.take_events():
            self._deliver(events)

    def _run(self, engine: StepEngine) -> None:
        try:
            while self._take_commands(engine):
                for sequence in self._batch.admit():
                    self._on_admit(sequence.request)
                if self._batch.running or self._batch.closing or engine.is_step_in_flight:
                    engine.run()
        except Exception as error:
            log.exception("the step loop failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _take_commands(self, engine: StepEngine) -> bool:
        """Runs posted commands; sleeps while there is nothing to do at all. False to stop."""
        while True:
            with self._condition:
                commands, self._commands = self._commands, []
                is_stopping = self._is_stopping
            for command in commands:
                command()
            if is_stopping:
                engine.catch_up()
                self.flush()
                return False
            batch = self._batch
            if batch.running or batch.closing or batch.waiting or engine.is_step_in_flight:
                return True
            engine.catch_up()
            self.flush()
            with self._condition:
                if not self._commands and not self._is_stopping:
                    self._condition.wait()

    def _fail(self, reason: str) -> None:
        """Ends every request with the reason, so that no client waits for a loop that is gone."""
        with self._condition:
            self._is_stopping = True
            commands, self._commands = self._commands, []
        try:
            for command in commands:
                command()
            waiting = [sequence for group in self._batch.waiting for sequence in group]
            for sequence in [*self._batch.running, *waiting]:
                self._committer.finish(sequence, FinishReason.ERROR, reason)
            self.flush()
        finally:
            self._on_failure(reason)
