"""Steps over one long-lived stream: answered in order, traced ones by call, errors in words, a new stream after one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dspark.v1 import verifier_pb2, verifier_pb2_grpc

from scheduler_service.transport import ExecutorError, VerifierTransport, call_executor
from service_kit import rpc
from service_kit.errors import InvalidRequestError


class Servicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Echoes token ids; refuses an empty step; step 99 waits to be released."""

    def __init__(self) -> None:
        self.num_streams, self.num_calls = 0, 0
        self.release = threading.Event()

    def Step(self, request: Any, context: Any) -> Any:
        self.num_calls += context is not None
        if request.step_id == 99:
            self.release.wait(20)
        if not request.token_ids:
            raise InvalidRequestError("a step needs tokens", field="token_ids")
        return verifier_pb2.StepResponse(token_ids=request.token_ids)

    def StepStream(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.num_streams += 1
        for request in requests:
            yield verifier_pb2.StepStreamResponse(step=self.Step(request.step, None))


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[tuple[Servicer, VerifierTransport]]:
    servicer, address = Servicer(), rpc.socket_address(tmp_path, "verifier")
    server, _ = rpc.sync_server(
        "test",
        address,
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server),
        max_message_bytes=1 << 20,
    )
    server.start()
    with rpc.open_channel(address, max_message_bytes=1 << 20) as channel:
        yield servicer, VerifierTransport(channel)
    servicer.release.set()
    server.stop(1).wait()


def step(transport: VerifierTransport, step_id: int, *token_ids: int, **options: Any) -> list[int]:
    request = verifier_pb2.StepRequest(step_id=step_id, token_ids=token_ids)
    response = call_executor("verifier", transport.Step, request, options.pop("timeout_s", 10.0), **options)
    return list(response.token_ids)


def test_one_stream_carries_all_steps(connected: tuple[Servicer, VerifierTransport]) -> None:
    servicer, transport = connected
    assert [step(transport, i, i, i + 1) for i in (1, 2, 3)] == [[1, 2], [2, 3], [3, 4]]
    assert (servicer.num_streams, servicer.num_calls) == (1, 0)


def test_a_traced_step_is_a_call_of_its_own(connected: tuple[Servicer, VerifierTransport]) -> None:
    servicer, transport = connected
    assert step(transport, 1, 5, metadata=(("traceparent", "00-1-2-01"),)) == [5]
    assert (servicer.num_streams, servicer.num_calls) == (0, 1)


def test_other_work_is_done_while_the_executor_has_the_step(connected: tuple[Servicer, VerifierTransport]) -> None:
    servicer, transport = connected
    assert step(transport, 99, 7, on_sent=servicer.release.set) == [7], "on_sent must run before the answer is awaited"


def test_a_refused_step_is_told_in_words_and_the_next_one_gets_a_new_stream(
    connected: tuple[Servicer, VerifierTransport],
) -> None:
    servicer, transport = connected
    with pytest.raises(ExecutorError, match="verifier: INVALID_ARGUMENT: a step needs tokens"):
        step(transport, 1)
    assert step(transport, 2, 8) == [8]
    assert servicer.num_streams == 2


def test_an_overdue_step_is_given_up(connected: tuple[Servicer, VerifierTransport]) -> None:
    servicer, transport = connected
    with pytest.raises(ExecutorError, match=r"no answer within 0\.1 s"):
        step(transport, 99, 1, timeout_s=0.1)
    servicer.release.set()
    assert step(transport, 100, 9) == [9]


def test_a_lost_executor_is_an_error_in_words(tmp_path: Path) -> None:
    with (
        rpc.open_channel(rpc.socket_address(tmp_path, "nobody"), max_message_bytes=1 << 20) as channel,
        pytest.raises(ExecutorError, match="verifier: UNAVAILABLE"),
    ):
        step(VerifierTransport(channel), 1, 1)
