"""The drafter process: starts, answers, leaves nothing behind; says in words why it cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from drafter_harness import TARGET, VANILLA_DRAFTER, make_checkpoint
from dspark.v1 import drafter_pb2, drafter_pb2_grpc

from service_kit.rpc import open_channel, socket_address, wait_until_serving

START_TIMEOUT_S = 60.0


def start_drafter(run_dir: Path, drafter: Path) -> subprocess.Popen[str]:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("DSPARK_")},
        "DSPARK_RUN_DIR": str(run_dir),
        "DSPARK_CACHE_DIR": str(run_dir / "cache"),
        "DSPARK_DRAFTER_MODEL": str(drafter),
        "DSPARK_DRAFTER_TARGET": str(TARGET),
        "DSPARK_DRAFTER_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "drafter_service"], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_it_serves_until_told_to_stop(tmp_path: Path) -> None:
    process = start_drafter(tmp_path, VANILLA_DRAFTER)
    try:
        with open_channel(socket_address(tmp_path, "drafter"), max_message_bytes=2**20) as channel:
            assert wait_until_serving(channel, "dspark.v1.DrafterService", START_TIMEOUT_S)
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            info = stub.GetInfo(drafter_pb2.DrafterServiceGetInfoRequest(), timeout=5)
            assert info.model == str(VANILLA_DRAFTER)
            with pytest.raises(grpc.RpcError, match="attach first") as refused:
                stub.Draft(drafter_pb2.DraftRequest(session=1, step_id=1), timeout=5)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert not (tmp_path / "drafter.sock").exists()
    finally:
        process.kill()
        process.communicate()


def test_a_drafter_of_another_target_stops_the_start_in_words(tmp_path: Path) -> None:
    drafter = make_checkpoint(tmp_path / "drafter", {"num_target_layers": 8})
    process = start_drafter(tmp_path, drafter)
    _, errors = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 1
    assert "drafter: the drafter was made for another target: its num_target_layers is 8" in errors
    assert "Traceback" not in errors
