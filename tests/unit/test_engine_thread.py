"""Repeated calls with a known step id are answered or joined, never run twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from service_kit.engine_thread import EngineThread, StepReplies
from service_kit.errors import SessionMismatchError


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    thread = EngineThread("engine")
    yield thread
    thread.stop()


def test_work_runs_on_the_one_engine_thread(engine: EngineThread) -> None:
    names = {engine.submit(lambda: threading.current_thread().name).result() for _ in range(3)}
    assert names == {"engine"}


def test_a_step_runs_on_its_callers_thread_alone(engine: EngineThread) -> None:
    held, release, order = threading.Event(), threading.Event(), []

    def hold() -> None:
        held.set()
        release.wait(5)
        order.append("queued")

    queued = engine.submit(hold)
    assert held.wait(5)
    caller = threading.Thread(target=lambda: engine.run(lambda: order.append(threading.current_thread().name)))
    caller.start()
    assert order == []
    release.set()
    caller.join(5)
    queued.result(5)
    assert order == ["queued", caller.name]


def test_an_exception_reaches_its_caller_and_the_thread_lives_on(engine: EngineThread) -> None:
    def fail() -> None:
        raise ValueError("broken row")

    with pytest.raises(ValueError, match="broken row"):
        engine.submit(fail).result()
    assert engine.submit(lambda: 7).result() == 7


def test_a_known_step_is_answered_from_the_last_reply(engine: EngineThread) -> None:
    replies: StepReplies[int] = StepReplies(engine)
    runs: list[int] = []

    def work() -> int:
        runs.append(1)
        return len(runs)

    assert [replies.call(5, work), replies.call(5, work), replies.call(6, work)] == [1, 1, 2]
    # A lost connection may have had two calls in flight: both are answered when they are repeated, in order.
    assert [replies.call(5, work), replies.call(6, work), replies.call(7, work)] == [1, 2, 3]
    with pytest.raises(SessionMismatchError, match="older than step 7"):
        replies.call(5, work)


def test_a_failed_step_fails_again_when_it_is_repeated(engine: EngineThread) -> None:
    replies: StepReplies[int] = StepReplies(engine)

    def fail() -> int:
        raise ValueError("broken step")

    for work in (fail, lambda: 1):
        with pytest.raises(ValueError, match="broken step"):
            replies.call(3, work)
    assert replies.call(4, lambda: 2) == 2


def test_a_running_step_is_joined(engine: EngineThread) -> None:
    replies: StepReplies[int] = StepReplies(engine)
    started, finish, runs = threading.Event(), threading.Event(), []

    def work() -> int:
        runs.append(1)
        started.set()
        finish.wait(5)
        return 42

    results: list[int] = []
    callers = [threading.Thread(target=lambda: results.append(replies.call(1, work))) for _ in range(2)]
    for caller in callers:
        caller.start()
    assert started.wait(5)
    finish.set()
    for caller in callers:
        caller.join(5)
    assert results == [42, 42]
    assert len(runs) == 1


def test_an_older_step_is_refused(engine: EngineThread) -> None:
    replies: StepReplies[int] = StepReplies(engine)
    replies.call(5, lambda: 1)
    with pytest.raises(SessionMismatchError, match="older than step 5"):
        replies.call(4, lambda: 1)
    with pytest.raises(SessionMismatchError):
        StepReplies[int](engine).call(0, lambda: 1)
