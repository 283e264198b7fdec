"""`dspark calibrate` whole, on the tiny pair: prompts in, a calibration that the next server uses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import grpc
import pytest
from dspark.v1 import scheduler_pb2, scheduler_pb2_grpc
from tiny_target import DRAFTER, TARGET, clone_with_tokenizer

from launcher.calibrate import CalibrateOptions, run_calibrate
from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import StopRequest
from service_kit.rpc import socket_address
from service_kit.settings import CommonSettings

REGIMES = ("greedy", "coupled", "rejection")


def _pair(directory: Path) -> ModelPair:
    target, drafter = directory / "tiny-qwen3", directory / "drafter"
    target.mkdir()
    clone_with_tokenizer(TARGET, target)
    shutil.copytree(DRAFTER, drafter)
    return ModelPair(target, "tiny-qwen3", drafter, "")


def _calibration_in_use(pair: ModelPair, common: CommonSettings) -> str:
    options = ServeOptions(port=free_port_pair(), verify_mode="static", max_num_seqs=2, kv_memory="16MiB")
    with running_server(options, pair, common=common, settings=LauncherSettings(), stop=StopRequest()) as server:
        assert server is not None
        with grpc.insecure_channel(socket_address(server.run_dir, "scheduler")) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)  # type: ignore[no-untyped-call]
            return str(stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=10).calibration)


def test_prompts_become_a_calibration_that_the_next_server_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_VERIFIER_WEIGHT_FORMAT", "float32")
    pair, common = _pair(tmp_path), CommonSettings(run_dir=tmp_path / "run")
    prompts, held_out = tmp_path / "prompts.jsonl", tmp_path / "others.jsonl"
    for file, words in ((prompts, "fit"), (held_out, "judge")):
        file.write_text("".join(json.dumps({"prompt": f"{words} {i}"}) + "\n" for i in range(8)))
    options = CalibrateOptions([prompts], [held_out], max_tokens=44)
    run_calibrate(options, pair, common, LauncherSettings())

    assert pair.drafter is not None
    written = json.loads((pair.drafter / "calibration.json").read_text())
    assert set(written["temperatures"]) == set(written["shifts"]) == set(REGIMES)
    assert written["prompts"] == {"fitted": {"prompts": 8}, "held_out": {"others": 8}}
    for regime in REGIMES:
        judged = written["held_out"][regime]
        assert written["num_rounds_fitted"][regime] >= 300
        # a random drafter's confidences say nothing about what a random target accepts, until they are fitted
        assert judged["mean_ece_after"] < 0.7 * judged["mean_ece_before"]
    assert (pair.drafter / "calibration.png").stat().st_size > 10_000
    assert not list(pair.drafter.glob("calibration.[0-9]*")), "a temporary file was left"
    assert "calibration.json" in _calibration_in_use(pair, common)
