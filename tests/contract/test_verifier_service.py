"""The verifier's gRPC service as its scheduler sees it: GetInfo, Attach, Step, errors, health and the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from dspark.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service_kit import telemetry
from service_kit.engine_thread import EngineThread
from service_kit.handoff import Arena, ArenaSpec
from service_kit.rpc import CONTRACT_VERSION, field_of, open_channel, socket_address, sync_server, wait_until_serving
from verifier_service.server import SERVICE_NAME, VerifierServicer, load_servicer
from verifier_service.settings import VerifierSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "target"
MAX_MESSAGE_BYTES = 2**20
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def servicer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerifierServicer]:
    thread = EngineThread("test-verifier")
    settings = VerifierSettings(model=str(GOLDEN), weight_format="float32", kernels="reference", threads=1)
    servicer = load_servicer(settings, thread)
    yield servicer
    servicer.close()
    thread.stop()


@pytest.fixture(scope="module")
def channel(servicer: VerifierServicer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    address = socket_address(tmp_path_factory.mktemp("run"), "verifier")

    def register(server: grpc.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)

    server, _ = sync_server(SERVICE_NAME, address, register, max_message_bytes=MAX_MESSAGE_BYTES)
    server.start()
    with open_channel(address, max_message_bytes=MAX_MESSAGE_BYTES) as channel:
        yield channel
    server.stop(None).wait()


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return verifier_pb2_grpc.VerifierServiceStub(channel)


def attach_request(session: int, **changes: Any) -> verifier_pb2.VerifierServiceAttachRequest:
    fields: dict[str, Any] = {
        "session": session,
        "num_slots": 2,
        "num_pages": 8,
        "max_model_len": 64,
        "max_batch_tokens": 32,
        "feature_ring_rows": 32,
        "max_draft_tokens": 3,
        "feature_layer_ids": [1, 3],
        **changes,
    }
    return verifier_pb2.VerifierServiceAttachRequest(**fields)


def admission(slot: int, regime: types_pb2.Regime.ValueType) -> types_pb2.SlotUpdates:
    sampling = types_pb2.SlotAdmission(slot=slot, regime=regime, temperature=1.0, top_p=1.0, key=3)
    pages = [slot * 4 + index for index in range(4)]
    return types_pb2.SlotUpdates(admissions=[sampling], page_slots=[slot] * 4, page_indices=range(4), page_ids=pages)


def step_request(session: int, epoch: int, step_id: int, **changes: Any) -> verifier_pb2.StepRequest:
    """One prompt of four tokens in slot 1, emitting."""
    fields: dict[str, Any] = {
        "row_slots": [1],
        "row_starts": [0],
        "row_num_tokens": [4],
        "row_num_drafts": [0],
        "row_emits": [True],
        "row_rounds": [0],
        "token_ids": [5, 6, 7, 8],
        **changes,
    }
    return verifier_pb2.StepRequest(session=session, epoch=epoch, step_id=step_id, **fields)


def test_info_describes_the_target_before_attach(stub: Any) -> None:
    info = stub.GetInfo(verifier_pb2.VerifierServiceGetInfoRequest(), timeout=TIMEOUT_S)
    assert info.contract_version == CONTRACT_VERSION
    assert info.model == str(GOLDEN)
    assert len(info.fingerprint) == 32
    assert info.epoch > 0
    assert (info.vocab_size, info.hidden_size, info.num_layers, info.max_position) == (512, 64, 6, 512)
    assert (info.page_size, info.page_bytes) == (16, 6 * 2 * 2 * 16 * 16 * 4)
    assert list(info.eos_token_ids) == []
    assert info.weight_format == "float32"
    assert info.weight_format_reason == "as set"
    assert info.inexact_reason == "rows of a forward differ from the same rows computed alone"  # reference kernels do
    assert "1 threads" in info.device
    assert all(padded >= wanted for wanted, padded in enumerate(info.padded_rows, 1))
    assert len(info.padded_rows) >= 32
    assert not info.sampling_defaults.HasField("temperature")


def test_a_request_over_the_wire(stub: Any, servicer: VerifierServicer) -> None:
    session = 101
    attached = stub.Attach(attach_request(session), timeout=TIMEOUT_S)
    ring = Arena.attach(attached.features_arena, session=session)
    assert ring.spec.shape == (2, 32, 2 * 64)
    request = step_request(session, attached.epoch, 1, slots=admission(1, types_pb2.REGIME_GREEDY))
    response = stub.Step(request, timeout=TIMEOUT_S)
    assert (list(response.verify_lens), list(response.accepted_lens), len(response.token_ids)) == ([0], [0], 1)
    assert [timing.phase for timing in response.timings] == ["forward", "features", "head", "accept", "total"]
    assert ring.stamps[1, :4, 1:].tolist() == [[1, 1, position] for position in range(4)]
    assert servicer.Step(request, None) == response  # a repeated call, this time in process
    ring.close()


def test_a_stale_draft_row_fails_alone(stub: Any) -> None:
    session = 102
    epoch = stub.Attach(attach_request(session), timeout=TIMEOUT_S).epoch
    probs = Arena.create(ArenaSpec((2, 3, 512), np.float32, 1, session, 1))
    assert stub.Attach(attach_request(session, draft_probs_arena=probs.name), timeout=TIMEOUT_S).epoch == epoch
    for slot in (0, 1):
        updates = admission(slot, types_pb2.REGIME_REJECTION)
        stub.Step(step_request(session, epoch, slot + 1, slots=updates, row_slots=[slot]), timeout=TIMEOUT_S)
    probs.rows[:] = 1 / 512
    probs.stamps[0] = (session, 9, 0, 5)
    verify = step_request(
        session,
        epoch,
        3,
        row_slots=[1, 0],
        row_starts=[4, 4],
        row_num_tokens=[3, 3],
        row_num_drafts=[2, 2],
        row_emits=[True, True],
        row_rounds=[9, 9],
        token_ids=[1, 2, 3, 4, 5, 6],
        prob_rows=[1, 0, 1],
        prob_positions=[5, 5, 4],
        prob_token_ids=[511, 511, 511],
    )
    response = stub.Step(verify, timeout=TIMEOUT_S)
    told = np.frombuffer(response.target_probs, "<f4")
    assert 0.0 < told[0] < 1.0
    assert np.isnan(told[1:]).all()
    assert [failure.row for failure in response.failures] == [0]
    assert list(response.verify_lens) == [0, 2]
    assert len(response.token_ids) == response.accepted_lens[1] + 1
    probs.close()


def test_errors_are_statuses_that_name_the_field(stub: Any) -> None:
    session = 103
    epoch = stub.Attach(attach_request(session), timeout=TIMEOUT_S).epoch
    with pytest.raises(grpc.RpcError) as caught:
        stub.Step(step_request(session, epoch + 1, 1), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    bad = step_request(session, epoch, 1, slots=admission(1, types_pb2.REGIME_GREEDY), token_ids=[1, 2, 3])
    with pytest.raises(grpc.RpcError) as caught:
        stub.Step(bad, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(caught.value.trailing_metadata()) == "token_ids"
    admitted = {"slots": admission(1, types_pb2.REGIME_GREEDY)}
    for step_id, asks in enumerate(
        ({"prob_rows": [0]}, {"prob_rows": [1], "prob_positions": [4], "prob_token_ids": [5]}), 2
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Step(step_request(session, epoch, step_id, **admitted, **asks), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field_of(caught.value.trailing_metadata()) == "prob_rows"
    with pytest.raises(grpc.RpcError) as caught:
        stub.Attach(attach_request(104, num_pages=2**31), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert field_of(caught.value.trailing_metadata()) == "kv_memory"


def test_profile_over_the_wire(stub: Any) -> None:
    request = verifier_pb2.ProfileRequest(num_tokens=3, context_len=20, repeats=2)
    assert len(stub.Profile(request, timeout=TIMEOUT_S).forward_ns) == 2


def test_a_traced_step_is_a_span_of_its_caller(
    servicer: VerifierServicer, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    session = 105
    epoch = stub.Attach(attach_request(session), timeout=TIMEOUT_S).epoch
    untraced = step_request(session, epoch, 1, slots=admission(1, types_pb2.REGIME_GREEDY))
    stub.Step(untraced, timeout=TIMEOUT_S)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    traced = step_request(session, epoch, 2, row_starts=[4])
    stub.Step(traced, timeout=TIMEOUT_S, metadata=(("traceparent", parent),))
    (span,) = exporter.get_finished_spans()
    assert span.name == "verifier.step"
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes is not None
    assert span.attributes["dspark.tokens"] == 4
    provider.shutdown()


def start_process(run_dir: Path, **settings: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "DSPARK_RUN_DIR": str(run_dir),
        "DSPARK_CACHE_DIR": str(run_dir / "cache"),
        "DSPARK_VERIFIER_MODEL": str(GOLDEN),
        "DSPARK_VERIFIER_KERNELS": "reference",
        "DSPARK_VERIFIER_WEIGHT_FORMAT": "float32",
        "DSPARK_VERIFIER_THREADS": "1",
        **settings,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "verifier_service"], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_the_process_serves_and_stops_cleanly(tmp_path: Path) -> None:
    process = start_process(tmp_path)
    try:
        with open_channel(socket_address(tmp_path, "verifier"), max_message_bytes=MAX_MESSAGE_BYTES) as channel:
            assert wait_until_serving(channel, SERVICE_NAME, 60.0)
            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            arena = stub.Attach(attach_request(5), timeout=TIMEOUT_S).features_arena
            assert Path("/dev/shm", arena).exists()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert not Path("/dev/shm", arena).exists()


def test_the_process_says_in_words_what_it_cannot_serve(tmp_path: Path) -> None:
    process = start_process(tmp_path, DSPARK_VERIFIER_MODEL=str(tmp_path / "nowhere"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "nowhere is not a directory" in errors
    assert "Traceback" not in errors
