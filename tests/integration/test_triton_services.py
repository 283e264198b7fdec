"""The four services on Triton's kernels, interpreted, as `dspark serve` starts them: the texts of the CPU's reference.

A server on the reference kernels says what is right; then one on Triton's in each mode is asked the same over HTTP.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from integration.conftest import processes_of
from tiny_pair import TinyPair, make_pair

from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions, ServicePlan, plan_services
from launcher.settings import LauncherSettings
from launcher.stack import RunningServer, running_server
from launcher.supervisor import StopRequest
from service_kit.device_memory import HANDLE_BYTES
from service_kit.gpu import gpu_problem, probe_gpu
from service_kit.settings import CommonSettings

TESTS = Path(__file__).parents[1]
HAS_GPU = not gpu_problem(probe_gpu())
EXECUTORS = ("verifier", "drafter")
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.5, "top_p": 0.9, "seed": 7, "max_tokens": 3},
    "masked": {"temperature": 0, "structured_outputs": {"regex": "[a-c]{2}"}, "ignore_eos": False},
    "penalised": {"temperature": 0, "repetition_penalty": 3.0, "frequency_penalty": 0.5, "prompt": "yzyz"},
}
"""Whose texts are the same in every mode."""
UNSEEDED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 3}


class Answers(NamedTuple):
    """What a server said."""

    texts: dict[str, str]
    """Text and finish reason by name of request."""
    num_accepted: int
    """Drafts, of all requests."""
    logs: str
    """Of both executors."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("models"))


@contextlib.contextmanager
def serve(pair: TinyPair, run_dir: Path, verify_mode: str, *, in_process: bool = False, **settings: str) -> Any:
    """A server with few rows; `settings` are those of both executors.

    Weights stay float32, as random ones have near ties that rounding decides.
    """
    settings = {"weight_format": "float32", "threads": "1", **settings}
    variables = {f"DSPARK_{service}_{name}".upper(): value for name, value in settings.items() for service in EXECUTORS}
    options = ServeOptions(
        port=free_port_pair(),
        verify_mode=verify_mode,
        max_num_seqs=2,
        max_model_len=32,
        max_batch_tokens=8,
        kv_memory="1MiB",
        in_process=in_process,
        changes=(
            *variables.items(),
            ("DSPARK_SCHEDULER_GUARD", "false"),
            ("DSPARK_SCHEDULER_STEP_TIMEOUT_S", "900"),
            ("TRITON_INTERPRET", "1"),
        ),
    )
    models, common = ModelPair(pair.target, "tiny", pair.drafter, ""), CommonSettings(run_dir=run_dir)
    with running_server(options, models, common=common, settings=LauncherSettings(), stop=StopRequest()) as server:
        assert server is not None
        yield server


def answers(server: RunningServer) -> Answers:
    """Asks everything at once."""

    def ask(fields: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, **fields}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600, trust_env=False)
        assert reply.status_code == 200, reply.text
        content: dict[str, Any] = reply.json()
        return content

    with ThreadPoolExecutor(len(REQUESTS) + 1) as pool:
        *replies, unseeded = pool.map(ask, (*REQUESTS.values(), UNSEEDED))
    assert unseeded["choices"][0]["finish_reason"] == "length"
    return Answers(
        {
            name: "{text!r} {finish_reason}".format(**reply["choices"][0])
            for name, reply in zip(REQUESTS, replies, strict=True)
        },
        sum(
            reply["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
            for reply in replies
            if "metrics" in reply
        ),
        "".join(path.read_text() for path in server.log_dir.glob("*.log") if path.stem in (*EXECUTORS, "server")),
    )


@pytest.fixture(scope="module")
def expected(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Of the reference engine."""
    device = "cpu" if HAS_GPU else "auto"
    run_dir = tmp_path_factory.mktemp("run")
    with serve(pair, run_dir, "static", in_process=True, kernels="reference", device=device) as server:
        found = answers(server)
    assert len(set(found.texts.values())) == len(REQUESTS)
    assert found.texts["masked"].endswith("stop")
    assert found.num_accepted > 0
    return found


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU, which auto takes")
def test_auto_serves_on_the_cpu_where_there_is_no_gpu_and_says_why(expected: Answers) -> None:
    for service in EXECUTORS:
        assert f"WARNING serving on the CPU (DSPARK_{service.upper()}_DEVICE=auto): torch" in expected.logs
        assert f"memory of the {service}, " in expected.logs


@pytest.mark.parametrize("verify_mode", ["off", "static", "compact"])
def test_texts_are_those_of_the_reference(verify_mode: str, pair: TinyPair, expected: Answers, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    with serve(pair, tmp_path, verify_mode, kernels="triton") as server:
        assert len(server.supervisor.processes) == (3 if verify_mode == "off" else 4)
        found = answers(server)
    assert "kernels triton" in found.logs
    assert found.texts == expected.texts
    if verify_mode != "compact":  # whose lengths follow from what steps cost, here in the interpreter
        assert (found.num_accepted > 0) == (verify_mode == "static")


def test_captured_steps_hand_device_memory_from_process_to_process(
    pair: TinyPair, expected: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is not there: its graphs call kernels in the interpreter, its memory is files."""
    pytest.importorskip("triton")

    def on_it(*arguments: Any) -> list[ServicePlan]:
        plans = plan_services(*arguments)
        return [plan._replace(module=f"fakes.gpu_{plan.name}") if plan.name in EXECUTORS else plan for plan in plans]

    monkeypatch.setattr("launcher.stack.plan_services", on_it)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{TESTS.parent}")
    with serve(pair, tmp_path, "static", device="cuda") as server:
        found = answers(server)
        regions = [path.read_bytes() for path in server.run_dir.iterdir() if len(path.name) == HANDLE_BYTES]
    assert sum(any(region) for region in regions) >= 2  # features by the verifier, distributions by the drafter
    for service in EXECUTORS:
        assert f"memory of the {service}, a GPU that is not there" in found.logs
    assert found.texts == expected.texts
    assert found.num_accepted > 0


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_in_words_and_leaves_nothing(pair: TinyPair, tmp_path: Path) -> None:
    environment = {**os.environ, "DSPARK_RUN_DIR": str(tmp_path / "run"), "DSPARK_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {f"DSPARK_{service.upper()}_DEVICE": "cuda" for service in EXECUTORS}
    command = [sys.executable, "-m", "launcher.cli", "serve", "--port", str(free_port_pair())]
    command += ["--model", str(pair.target), "--drafter", str(pair.drafter)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "_DEVICE=cuda: torch" in done.stderr
    assert "to cpu or auto" in done.stderr
    assert "Traceback" not in done.stderr
    assert processes_of(tmp_path / "run") == []
    assert list((tmp_path / "run").iterdir()) == []
