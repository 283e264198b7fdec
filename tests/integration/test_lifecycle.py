"""`dspark serve` as a user runs it: start, stop, refusals, deaths, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.conftest import processes_of

from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from service_kit.handoff import remove_orphans
from service_kit.settings import CommonSettings

pytestmark = pytest.mark.model

_START_S = 300.0


class Launcher:
    """A `dspark serve` process with small sizes, and its output."""

    def __init__(self, common: CommonSettings, run_dir: Path, output: Path, *options: str) -> None:
        self.port, self.run_dir, self._output = free_port_pair(), run_dir, output
        environment = {**os.environ, "DSPARK_RUN_DIR": str(run_dir), "DSPARK_CACHE_DIR": str(common.cache_dir)}
        sizes = ["--port", str(self.port), "--max-num-seqs", "2", "--kv-memory", "64MiB"]
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launcher.cli", "serve", *sizes, *options],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = _START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"timed out waiting until {what}: {self.output}"
            time.sleep(0.05)

    def wait_ready(self) -> None:
        self.wait(lambda: "ready in" in self.output or self.process.poll() is not None, "the server is ready")
        assert self.process.poll() is None, self.output

    def assert_nothing_left(self) -> None:
        self.wait(lambda: processes_of(self.run_dir) == [], "all processes are gone", 60)
        self.wait(lambda: list(self.run_dir.glob("serve-*")) == [], "the sockets are gone", 10)
        assert remove_orphans() == []


@pytest.fixture
def start(common: CommonSettings, pair: ModelPair, tmp_path_factory: Any) -> Iterator[Callable[..., Launcher]]:
    launchers: list[Launcher] = []

    def start(*options: str) -> Launcher:
        directory = tmp_path_factory.mktemp("serve")
        launchers.append(Launcher(common, directory / "run", directory / "output", *options))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.process.kill()
        launcher.process.wait()


def test_one_ready_line_and_a_clean_stop(start: Any) -> None:
    launcher = start("--verify-mode", "static")
    launcher.wait_ready()
    assert launcher.output.count("ready in") == 1
    assert f"chat: dspark chat --url http://127.0.0.1:{launcher.port}" in launcher.output
    assert len(processes_of(launcher.run_dir)) == 4
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    reply = httpx.post(f"http://127.0.0.1:{launcher.port}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(60) == 0
    launcher.assert_nothing_left()


def test_a_killed_launcher_leaves_nothing(start: Any) -> None:
    launcher = start("--verify-mode", "static")
    launcher.wait_ready()
    launcher.process.kill()
    launcher.process.wait()
    launcher.assert_nothing_left()


def test_a_dead_service_stops_everything_and_is_named(start: Any) -> None:
    launcher = start("--verify-mode", "off")
    launcher.wait_ready()
    verifier = next(
        pid for pid in processes_of(launcher.run_dir) if b"verifier" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(verifier, signal.SIGKILL)
    assert launcher.process.wait(60) == 1
    assert "error: verifier ended (signal SIGKILL)" in launcher.output
    assert "verifier.log" in launcher.output
    launcher.assert_nothing_left()


def test_sizes_that_do_not_fit_are_refused_naming_the_setting(start: Any) -> None:
    launcher = start("--verify-mode", "off", "--kv-memory", "4MiB", "--max-model-len", "8000")
    assert launcher.process.wait(_START_S) == 1
    assert "error: scheduler ended" in launcher.output
    assert "kv_memory" in launcher.output
    assert "DSPARK_SCHEDULER_MAX_MODEL_LEN" in launcher.output
    assert "Traceback" not in launcher.output
    launcher.assert_nothing_left()


def test_a_port_in_use_is_refused_before_anything_starts(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = start("--port", str(port))
        assert launcher.process.wait(_START_S) == 1
    assert f"port {port}" in launcher.output
    assert "--port" in launcher.output
    assert "logs:" not in launcher.output


def test_a_corrupt_drafter_is_refused_before_anything_starts(start: Any, pair: ModelPair, tmp_path: Path) -> None:
    assert pair.drafter is not None
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    shutil.copy(pair.drafter / "config.json", drafter)
    weights = (pair.drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    launcher = start("--drafter", str(drafter))
    assert launcher.process.wait(_START_S) == 1
    assert "error: " in launcher.output
    assert "corrupt or incomplete" in launcher.output
    assert "--drafter none" in launcher.output
    assert "logs:" not in launcher.output
