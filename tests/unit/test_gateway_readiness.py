"""The progress heartbeat: stalled is no token while something is to be done, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import DrainingError
from gateway.readiness import Readiness
from gateway.tokens import ModelInfo, Progress
from service_kit.errors import ServiceError, UnavailableError

INFO = ModelInfo("m", "d", "static", 100, 300, 4, 4)


class Scheduler:
    """Says what a test sets."""

    def __init__(self) -> None:
        self.serves = True
        self.now = 0.0
        self.answer: Progress | ServiceError = Progress(0, 0)

    async def is_serving(self) -> bool:
        return self.serves

    async def model_info(self) -> ModelInfo:
        return INFO

    async def progress(self) -> Progress:
        if isinstance(self.answer, ServiceError):
            raise self.answer
        return self.answer


def states(*polls: tuple[float, Progress | ServiceError]) -> list[str]:
    """The state after each poll: at a time in seconds, with the scheduler's answer. It is ready at 0 s."""

    async def run() -> list[str]:
        scheduler = Scheduler()
        readiness = Readiness(scheduler, stall_timeout_s=10.0, clock=lambda: scheduler.now)  # type: ignore[arg-type]
        await readiness.refresh()
        seen = []
        for scheduler.now, scheduler.answer in polls:
            await readiness.refresh()
            seen.append(readiness.state)
        return seen

    return asyncio.run(run())


def test_no_token_for_too_long_while_requests_run_is_a_stall() -> None:
    assert states((1, Progress(2, 5)), (9, Progress(2, 5)), (11, Progress(2, 5)), (11.5, Progress(2, 5))) == [
        *("ready", "ready", "ready", "stalled")
    ]
    assert states((1, Progress(1, 5)), (12, Progress(1, 5)), (13, Progress(1, 6)), (14, Progress(1, 6)))[1:] == [
        *("ready", "ready", "ready")
    ]
    assert states((6, Progress(1, 5)), (12, Progress(1, 5)), (18, Progress(1, 5)), (19, Progress(1, 6)))[1:] == [
        *("ready", "stalled", "ready")
    ]


def test_idle_is_fine_however_long() -> None:
    polls = [(second, Progress(0, 5)) for second in range(5, 100, 5)]
    assert set(states(*polls)) == {"ready"}
    assert states((50, Progress(0, 5)), (55, Progress(1, 5)), (60, Progress(1, 5)))[-1] == "ready"  # just begun


def test_a_scheduler_that_does_not_answer_makes_no_progress() -> None:
    silent = UnavailableError("deadline")
    assert states((1, Progress(1, 5)), (6, silent), (12, silent))[-1] == "stalled"
    assert states((1, Progress(0, 5)), (6, silent), (12, silent), (18, silent))[-1] == "ready"


def test_a_process_that_was_paused_does_not_cry_stall() -> None:
    assert states((1, Progress(1, 5)), (500, Progress(1, 5)), (501, Progress(1, 6))) == ["ready", "ready", "ready"]


def test_states_turn_and_listeners_hear_of_it() -> None:
    async def run() -> None:
        scheduler, heard = Scheduler(), []
        readiness = Readiness(scheduler, stall_timeout_s=10.0, clock=lambda: scheduler.now)  # type: ignore[arg-type]

        async def listen(is_ready: bool) -> None:
            heard.append((readiness.state, is_ready))

        readiness.listeners.append(listen)
        await readiness.refresh()
        for scheduler.now in (6.0, 12.0):
            scheduler.answer = Progress(1, 5)
            await readiness.refresh()
        await readiness.refresh()
        scheduler.now = 18.0
        await readiness.refresh()
        assert readiness.require_info() is INFO  # a stalled server may come back
        scheduler.serves = False
        await readiness.refresh()
        with pytest.raises(UnavailableError):
            readiness.require_info()
        scheduler.serves = True
        await readiness.refresh()
        await readiness.drain()
        await readiness.refresh()
        with pytest.raises(DrainingError):
            readiness.require_info()
        assert heard == [
            ("ready", True), ("stalled", False), ("unavailable", False), ("ready", True), ("draining", False)
        ]  # fmt: skip

    asyncio.run(run())
