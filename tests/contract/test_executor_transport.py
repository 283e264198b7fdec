"""Steps over the step socket: answered in order, one ahead, errors in words, a new connection after one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dspark.v1 import verifier_pb2, verifier_pb2_grpc

from scheduler_service.transport import Exchange, ExecutorError, VerifierTransport, calling
from service_kit import rpc
from service_kit.errors import InvalidRequestError
from service_kit.step_socket import StepServer, step_socket_path

_BYTES = 1 << 16


class Servicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Echoes token ids; refuses an empty step; step 99 waits to be released."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.step_ids: list[int] = []
        self.num_calls = 0
        self.started, self.release = threading.Event(), threading.Event()

    def Step(self, request: Any, context: Any) -> Any:
        self.num_calls += context is not None
        self.threads.add(threading.current_thread().name)
        self.step_ids.append(request.step_id)
        if request.step_id == 99:
            self.started.set()
            self.release.wait(20)
        if not request.token_ids:
            raise InvalidRequestError("a step needs tokens", field="token_ids")
        return verifier_pb2.StepResponse(token_ids=request.token_ids)

    def step_bytes(self, message: bytes) -> bytes:
        answer: bytes = self.Step(verifier_pb2.StepRequest.FromString(message), None).SerializeToString()
        return answer


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[tuple[Servicer, Exchange]]:
    servicer, address = Servicer(), rpc.socket_address(tmp_path, "verifier")
    path = step_socket_path(tmp_path, "verifier")
    path.touch()  # left by a dead process
    server, _ = rpc.sync_server(
        "test",
        address,
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server),
        max_message_bytes=_BYTES,
    )
    steps = StepServer(path, servicer.step_bytes, max_message_bytes=_BYTES)
    server.start()
    with rpc.open_channel(address, max_message_bytes=_BYTES) as channel:
        exchange = VerifierTransport(channel, path).exchange("Step")
        yield servicer, exchange
        servicer.release.set()
        steps.close()
        with contextlib.suppress(ExecutorError):
            receive(exchange)  # finds the connection closed, and closes its own end
    server.stop(1).wait()
    assert not path.exists()


def send(exchange: Exchange, step_id: int, *token_ids: int, metadata: Any = ()) -> None:
    with calling("verifier"):
        exchange.send(verifier_pb2.StepRequest(step_id=step_id, token_ids=token_ids), 10.0, metadata)


def receive(exchange: Exchange, timeout_s: float = 10.0) -> list[int]:
    with calling("verifier"):
        return list(exchange.receive(timeout_s).token_ids)


def step(exchange: Exchange, step_id: int, *token_ids: int, metadata: Any = ()) -> list[int]:
    send(exchange, step_id, *token_ids, metadata=metadata)
    return receive(exchange)


def test_one_connection_carries_all_steps(connected: tuple[Servicer, Exchange]) -> None:
    servicer, exchange = connected
    assert [step(exchange, i, i, i + 1) for i in (1, 2, 3)] == [[1, 2], [2, 3], [3, 4]]
    assert len(servicer.threads) == 1
    assert servicer.num_calls == 0


def test_a_traced_step_goes_by_grpc(connected: tuple[Servicer, Exchange]) -> None:
    servicer, exchange = connected
    assert step(exchange, 1, 5, metadata=(("traceparent", "00-1-2-01"),)) == [5]
    assert servicer.num_calls == 1
    assert step(exchange, 2, 6) == [6]
    assert servicer.num_calls == 1


def test_a_second_step_may_be_sent_before_the_first_is_answered(connected: tuple[Servicer, Exchange]) -> None:
    servicer, exchange = connected
    send(exchange, 99, 7)
    assert servicer.started.wait(10)
    send(exchange, 100, 8)
    servicer.release.set()
    assert [receive(exchange), receive(exchange)] == [[7], [8]]
    assert servicer.step_ids == [99, 100]


def test_a_refused_step_is_told_in_words_and_the_next_one_gets_a_new_connection(
    connected: tuple[Servicer, Exchange],
) -> None:
    _, exchange = connected
    with pytest.raises(ExecutorError, match="verifier: INVALID_ARGUMENT: a step needs tokens"):
        step(exchange, 1)
    assert step(exchange, 2, 8) == [8]


def test_a_failed_step_fails_the_one_behind_it(connected: tuple[Servicer, Exchange]) -> None:
    servicer, exchange = connected
    send(exchange, 99)
    assert servicer.started.wait(10)
    send(exchange, 100, 8)
    servicer.release.set()
    with pytest.raises(ExecutorError, match="a step needs tokens"):
        receive(exchange)
    with pytest.raises(ExecutorError, match="verifier: UNAVAILABLE: the connection was lost"):
        receive(exchange)
    assert step(exchange, 101, 9) == [9]
    assert servicer.step_ids == [99, 101], "a step behind a failed one must not run"


def test_an_overdue_step_is_given_up(connected: tuple[Servicer, Exchange]) -> None:
    servicer, exchange = connected
    send(exchange, 99, 1)
    with pytest.raises(ExecutorError, match=r"no answer within 0\.1 s"):
        receive(exchange, 0.1)
    servicer.release.set()
    assert step(exchange, 100, 9) == [9]


@pytest.mark.parametrize("num_tokens", [30_000, 3_000_000])  # the second never fits the socket's buffers
def test_a_message_over_the_bound_is_refused(connected: tuple[Servicer, Exchange], num_tokens: int) -> None:
    _, exchange = connected
    with pytest.raises(ExecutorError, match=r"RESOURCE_EXHAUSTED: .* more than max_message_bytes 65536"):
        step(exchange, 1, *([2**20] * num_tokens))
    assert step(exchange, 2, 9) == [9]


def test_an_executor_that_dies_is_an_error_in_words(tmp_path: Path) -> None:
    servicer, path = Servicer(), step_socket_path(tmp_path, "verifier")
    steps = StepServer(path, servicer.step_bytes, max_message_bytes=_BYTES)
    with rpc.open_channel(rpc.socket_address(tmp_path, "verifier"), max_message_bytes=_BYTES) as channel:
        exchange = VerifierTransport(channel, path).exchange("Step")
        send(exchange, 99, 1)
        assert servicer.started.wait(10)
        steps.close()
        with pytest.raises(ExecutorError, match="verifier: UNAVAILABLE: the connection was closed"):
            receive(exchange)
        servicer.release.set()
        with pytest.raises(ExecutorError, match=r"verifier: UNAVAILABLE: .*verifier\.step"):
            step(exchange, 100, 1)
