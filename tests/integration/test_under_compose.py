"""The services as compose.yaml starts them, with API keys: its commands, environments, users, volumes and limits."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from compose_file import SERVICES, load_project
from compose_sandbox import Sandbox, why_not
from tiny_target import DRAFTER, TARGET, clone_with_tokenizer

from launcher.services import kernel_cache
from service_kit.settings import CommonSettings

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
START_TIMEOUT_S = 300.0
KEY = "a-key-of-this-test"
URL = "http://127.0.0.1:8000"
"""In the gateway's network."""


def _make_models(directory: Path) -> None:
    target = directory / "tiny"
    target.mkdir(parents=True)
    clone_with_tokenizer(TARGET, target)
    shutil.copytree(DRAFTER, directory / "drafter")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """All services of the file on the tiny pair. Compiled kernels are taken from this machine's cache."""
    directory = tmp_path_factory.mktemp("compose")
    _make_models(directory / "models")
    keys = directory / "api-keys"
    keys.write_text(KEY + "\n")
    variables = {
        "MODELS_DIR": str(directory / "models"),
        "TARGET": "/models/tiny",
        "DRAFTER": "/models/drafter",
        "VERIFY_MODE": "static",
        "KV_MEMORY": "16MiB",
        "MAX_NUM_SEQS": "2",
        "API_KEYS_FILE": str(keys),
        "WEIGHT_FORMAT": "float32",  # the kernels that test_tiny_qwen3 has compiled by now
    }
    project = load_project("compose.yaml", "compose.keys.yaml", variables=variables)
    sandbox = Sandbox(project, directory)
    if (compiled := kernel_cache(CommonSettings())).is_dir():
        shutil.copytree(compiled, sandbox.volume("cache") / "numba")
        _own(sandbox.volume("cache"), project)
    try:
        setup = sandbox.start("setup")
        assert setup.process.wait(START_TIMEOUT_S) == 0, setup.log.read_text()
        sandbox.start("memory")
        for name in SERVICES:
            sandbox.start(name)
        loading = sandbox.containers["gateway"].check_health(project["services"]["gateway"])
        assert loading.returncode == 1, "healthy before anything is loaded"
        _wait_healthy(sandbox)
        yield sandbox
    finally:
        sandbox.close()


def _own(volume: Path, project: dict[str, Any]) -> None:
    """Gives what is in a volume to the services' user."""
    uid, gid = map(int, project["services"]["verifier"]["user"].split(":"))
    for path in volume.rglob("*"):
        os.chown(path, uid, gid)


def _is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _wait_healthy(stack: Sandbox) -> None:
    """Until the gateway says that requests are served."""
    gateway, deadline = stack.containers["gateway"], time.monotonic() + START_TIMEOUT_S
    while not gateway.within_network(_is_ready):
        logs = {name: container.log.read_text()[-2000:] for name, container in stack.containers.items()}
        assert time.monotonic() < deadline, logs
        assert gateway.process.poll() is None, logs["gateway"]
        time.sleep(0.2)


def _chat(stack: Sandbox, key: str = KEY) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    return stack.containers["gateway"].within_network(
        lambda: httpx.post(f"{URL}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)
    )


def test_every_health_check_passes_once_the_server_is_ready(stack: Sandbox) -> None:
    checks = {name: stack.containers[name].check_health(stack.project["services"][name]) for name in SERVICES}
    assert {name: check.returncode for name, check in checks.items()} == dict.fromkeys(SERVICES, 0), checks
    text = stack.containers["gateway"].execute(
        ["python", "-m", "service_kit.healthcheck", "127.0.0.1:8001", "dspark.v1.TextService"]
    )
    assert text.returncode == 0, text.stdout
    wrong = stack.containers["verifier"].execute(
        ["python", "-m", "service_kit.healthcheck", "unix:/run/dspark/verifier.sock", "dspark.v1.NoService"]
    )
    assert (wrong.returncode, "NOT_FOUND" in wrong.stdout) == (1, True), wrong.stdout


def test_a_chat_is_drafted_verified_and_answered(stack: Sandbox) -> None:
    reply = _chat(stack)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] > 0
    log = stack.containers["scheduler"].log.read_text()
    assert "verify_mode static, drafter /models/drafter" in log  # its probabilities come by shared memory
    assert _chat(stack, key="another").status_code == 401


def test_what_the_file_forbids_is_forbidden(stack: Sandbox) -> None:
    for name in ("memory", *SERVICES):
        container = stack.containers[name]
        assert container.execute(["id", "-u"]).stdout == "10001\n"
        assert container.execute(["touch", "/tmp/file"]).returncode == 0
        assert "Read-only file system" in container.execute(["touch", "/file"]).stderr
        status = container.execute(["cat", "/proc/self/status"]).stdout
        assert "CapEff:\t0000000000000000\n" in status
        assert "CapBnd:\t0000000000000000\n" in status
        assert "NoNewPrivs:\t1\n" in status
    assert "Read-only file system" in stack.containers["gateway"].execute(["touch", "/var/cache/dspark/file"]).stderr


def test_a_dead_executor_costs_its_requests_and_restarts_bring_the_server_back(stack: Sandbox) -> None:
    before = _chat(stack)
    stack.containers["verifier"].stop(signal.SIGKILL)
    assert _chat(stack).status_code in (500, 503)
    assert stack.containers["scheduler"].process.wait(60) == 1  # without its executor: restarted like it
    for name in ("verifier", "scheduler"):
        assert stack.project["services"][name]["restart"] == "unless-stopped"
        stack.start(name)
    _wait_healthy(stack)
    assert _chat(stack).json()["choices"] == before.json()["choices"]
    assert stack.containers["drafter"].process.poll() is None


def test_it_stops_in_order_and_leaves_nothing(stack: Sandbox) -> None:
    for name in reversed(SERVICES):
        assert stack.containers[name].stop() == 0, stack.containers[name].log.read_text()
    assert list(stack.volume("run").iterdir()) == []
    assert stack.containers["memory"].execute(["ls", "-A", "/dev/shm"]).stdout == ""
