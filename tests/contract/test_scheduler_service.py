"""SchedulerService over real gRPC: streams, statuses, cancellation, and the process from start to drain."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from dspark.v1 import drafter_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2, verifier_pb2_grpc
from fakes.executors import FakeDrafter, FakeVerifier, StepGate, fake_pair, reference_text
from fakes.rig import GREEDY, Rig, running
from grpc_health.v1 import health_pb2

from scheduler_service.server import SERVICE_NAME, SchedulerServicer
from service_kit import rpc
from service_kit.step_socket import StepServer, step_socket_path

_BYTES = 2**20
_GREEDY_PB = scheduler_pb2.SamplingParams(temperature=0.0)


@contextmanager
def _served(address: str, rig: Rig | None) -> Iterator[scheduler_pb2_grpc.SchedulerServiceStub]:
    """A blocking stub to a servicer on its own event loop."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        servicer = SchedulerServicer()
        server, _ = rpc.async_server(
            SERVICE_NAME,
            address,
            lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server),
            max_message_bytes=_BYTES,
        )
        await server.start()
        if rig is not None:
            servicer.serve(rig.scheduler, asyncio.Event())
        ready.set()
        await stop.wait()
        await server.stop(grace=1)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    channel = rpc.open_channel(address, max_message_bytes=_BYTES)
    try:
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel)
    finally:
        channel.close()
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/scheduler.sock"


def _request(request_id: str, prompt: list[int], **fields: Any) -> scheduler_pb2.GenerateRequest:
    return scheduler_pb2.GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt, **{"sampling": _GREEDY_PB, **fields}
    )


def _wait_for(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_stream_ends_with_one_summary(address: str) -> None:
    with running("static") as rig, _served(address, rig) as stub:
        messages = list(stub.Generate(_request("a", [1, 2, 3], max_tokens=15, num_choices=2), timeout=10))
        summary = messages[-1].summary
        assert [message.WhichOneof("event") for message in messages[:-1]] == ["chunk"] * (len(messages) - 1)
        for choice in range(2):
            chunks = [message.chunk for message in messages[:-1] if message.chunk.choice == choice]
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == reference_text([1, 2, 3], 15, GREEDY)
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
            assert chunks[-1].finish_reason == scheduler_pb2.FINISH_REASON_LENGTH
            assert summary.choices[choice].num_tokens == 15
            assert len(summary.choices[choice].accepted_histogram) == 6
        assert (summary.num_prompt_tokens, summary.error, summary.speculation_off_reason) == (3, "", "")


def test_model_info_and_load(address: str) -> None:
    with running("off", speculation_off_reason="no drafter fits") as rig, _served(address, rig) as stub:
        info = stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=5)
        assert (info.model, info.drafter, info.verify_mode, info.block_size) == ("toy-target", "", "off", 0)
        assert (info.max_model_len, info.vocab_size, info.max_num_seqs) == (64, 50, 4)
        assert list(info.eos_token_ids) == [0]
        assert info.sampling_defaults.temperature == 0.5
        assert not info.sampling_defaults.HasField("top_p")
        assert info.speculation_off_reason == "no drafter fits"
        assert info.inexact_reason == "a toy"
        list(stub.Generate(_request("a", [1, 2, 3], max_tokens=5), timeout=10))
        load = stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=5)
        assert (load.num_committed, load.num_prefill_tokens, load.num_steps, load.num_verify_rows) == (5, 3, 5, 4)
        assert load.num_free_pages == load.num_pages > 0
        assert load.verifier_model_ns == 5 * 1000
        assert load.step_ns > load.step_call_ns > 0


def test_calibration_is_told(address: str) -> None:
    with running("static", fake_pair(confidence=0.5, quality=1.0)) as rig, _served(address, rig) as stub:
        assert stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=5).calibration == "by a toy"
        list(stub.Generate(_request("a", [1, 2, 3], max_tokens=30), timeout=10))
        rig.wait_until_idle()
        load = stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=5)
    errors = load.calibration_errors
    assert [(each.regime, each.position) for each in errors] == [(types_pb2.REGIME_GREEDY, k) for k in range(1, 6)]
    assert errors[0].num_observed == load.num_drafted_steps > 0
    assert 0.3 < errors[0].ece <= 0.5 < 1 - 0.5**5 - 0.2 < errors[4].ece
    assert errors[0].correction > 0
    assert (load.num_audited_rounds, load.num_audit_drafts) == (0, 0)


def test_errors_are_statuses_that_name_the_field(address: str) -> None:
    with running("off", max_num_seqs=1, max_queued_requests=1) as rig, _served(address, rig) as stub:
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(_request("a", [1] * 64), timeout=5))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rpc.field_of(raised.value.trailing_metadata()) == "prompt_token_ids"
        with pytest.raises(grpc.RpcError) as raised:
            stub.Abort(scheduler_pb2.AbortRequest(request_id="a"), timeout=5)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        rig.verifier.gate = StepGate()
        streams = [stub.Generate(_request("1", [1], max_tokens=2), timeout=10)]
        _wait_for(lambda: rig.scheduler.load().num_running == 1)
        streams.append(stub.Generate(_request("2", [1], max_tokens=2), timeout=10))
        _wait_for(lambda: rig.scheduler.load().num_waiting == 1)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(_request("3", [1]), timeout=5))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        rig.verifier.gate.open()
        assert [len(list(stream)) for stream in streams] == [3, 3]


def test_not_loaded_yet(address: str) -> None:
    with _served(address, None) as stub:
        with pytest.raises(grpc.RpcError) as raised:
            stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=5)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("how", ["cancel", "abort", "channel"])
def test_a_client_that_leaves_gives_everything_back(address: str, how: str) -> None:
    with running("static") as rig, _served(address, rig) as stub:
        channel = rpc.open_channel(address, max_message_bytes=_BYTES)
        rig.verifier.gate = StepGate()
        stream = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(_request("a", [1, 2, 3]), timeout=20)
        _wait_for(lambda: rig.scheduler.load().num_running == 1)
        if how == "cancel":
            stream.cancel()
        elif how == "abort":
            stub.Abort(scheduler_pb2.AbortRequest(request_id="a", reason=scheduler_pb2.FINISH_REASON_ABORT), timeout=5)
        channel.close()
        time.sleep(0.1)  # lets the cancellation arrive while the step is held
        num_calls = len(rig.verifier.calls)
        rig.verifier.gate.open()
        _wait_for(lambda: rig.scheduler.load().num_free_slots == 4)
        assert len(rig.verifier.calls) - num_calls <= 1  # within one step
        rig.scheduler.check_integrity()


@contextmanager
def _executors(run_dir: Path, pair: tuple[FakeVerifier, FakeDrafter]) -> Iterator[None]:
    """Both fakes behind real sockets."""
    servers, steps = [], []
    add = (
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server,
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server,
    )
    for name, servicer, register in zip(("verifier", "drafter"), pair, add, strict=True):
        service = f"dspark.v1.{name.capitalize()}Service"
        server, health = rpc.sync_server(
            service,
            rpc.socket_address(run_dir, name),
            lambda server, s=servicer, r=register: r(s, server),  # type: ignore[misc]
            max_message_bytes=_BYTES,
        )
        health.set(service, health_pb2.HealthCheckResponse.SERVING)
        call = servicer.step_bytes if name == "verifier" else servicer.draft_bytes  # type: ignore[union-attr]
        steps.append(StepServer(step_socket_path(run_dir, name), call, max_message_bytes=_BYTES))
        server.start()
        servers.append(server)
    try:
        yield
    finally:
        for each in steps:
            each.close()
        with ThreadPoolExecutor() as pool:
            for server in servers:
                pool.submit(lambda s=server: s.stop(0).wait())  # type: ignore[misc]


@contextmanager
def _process(run_dir: Path, **settings: str) -> Iterator[subprocess.Popen[str]]:
    environment = {"DSPARK_RUN_DIR": str(run_dir), "DSPARK_CACHE_DIR": str(run_dir / "cache"), "PATH": "/usr/bin:/bin"}
    environment |= {f"DSPARK_SCHEDULER_{name.upper()}": value for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler_service"], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, log = process.communicate(timeout=20)
    return process.returncode, log


def test_the_process_serves_then_drains(tmp_path: Path) -> None:
    pair = fake_pair()
    address = rpc.socket_address(tmp_path, "scheduler")
    with _executors(tmp_path, pair), _process(tmp_path, kv_memory="64KiB") as process:
        with rpc.open_channel(address, max_message_bytes=_BYTES) as channel:
            assert rpc.wait_until_serving(channel, SERVICE_NAME, 20)
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            assert stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=5).verify_mode == "compact"
            pair[0].gate = StepGate()
            stream = stub.Generate(_request("a", [1, 2, 3], max_tokens=30), timeout=20)
            _wait_for(lambda: stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=5).num_running == 1)
            process.send_signal(signal.SIGTERM)

            def is_refused() -> bool:
                with pytest.raises(grpc.RpcError) as raised:  # or out of time, while the held step still admits
                    list(stub.Generate(_request("b", [1], max_tokens=1), timeout=0.2))
                return raised.value.code() is grpc.StatusCode.UNAVAILABLE and "draining" in str(raised.value.details())

            _wait_for(is_refused)
            pair[0].gate.open()
            tokens = [token for message in stream for token in message.chunk.token_ids]
            assert tokens == reference_text([1, 2, 3], 30, GREEDY)
        status, log = _finished(process)
        assert (status, "Traceback" in log) == (0, False), log
        assert "step costs in ms: bias" in log
        assert not (tmp_path / "scheduler.sock").exists()


def test_the_process_ends_when_an_executor_fails(tmp_path: Path) -> None:
    pair = fake_pair()
    address = rpc.socket_address(tmp_path, "scheduler")
    with _executors(tmp_path, pair), _process(tmp_path, verify_mode="static", kv_memory="64KiB") as process:
        with rpc.open_channel(address, max_message_bytes=_BYTES) as channel:
            assert rpc.wait_until_serving(channel, SERVICE_NAME, 20)
            pair[0].raises = RuntimeError("the engine is on fire")
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            *_, last = stub.Generate(_request("a", [1, 2, 3]), timeout=20)
            assert "the engine is on fire" in last.summary.error
        status, log = _finished(process)
        assert status == 1
        assert "stopping: ExecutorError: verifier: INTERNAL: RuntimeError: the engine is on fire" in log


def test_a_drafter_for_another_target_stops_the_start_in_words(tmp_path: Path) -> None:
    with (
        _executors(tmp_path, fake_pair(target_vocab_size=60)),
        _process(tmp_path, kv_memory="64KiB") as process,
    ):
        status, log = _finished(process)
        assert status == 1
        assert "it expects a vocabulary of 60, the target has 50" in log


def test_stopped_while_waiting_for_the_executors(tmp_path: Path) -> None:
    with _process(tmp_path) as process:
        _wait_for((tmp_path / "scheduler.sock").exists, 20)
        process.send_signal(signal.SIGTERM)
        assert _finished(process)[0] == 0
