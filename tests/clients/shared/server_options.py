"""A pytest plugin for the clients' environments: the server to talk to, by command line."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest


class Server(NamedTuple):
    """A server and what a client must know of it."""

    url: str
    """Without /v1."""
    api_key: str
    model: str
    model_dir: Path

    def get(self, path: str) -> str:
        """The body of `path`."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.api_key}"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(reply.read().decode())

    def metric(self, name: str) -> float:
        """Sum of all samples of one metric."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        assert lines, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Returns once nothing runs or waits; fails when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while running := self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline, f"{running:g} requests still run"
            time.sleep(0.1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The runner gives all of these."""
    parser.addoption("--server", action="append", metavar="NAME=URL", help="a server, by name")
    parser.addoption("--api-key", help="key of all servers")
    parser.addoption("--model-dir", type=Path, help="directory of the served model")


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> dict[str, Server]:
    """All servers given, by name."""
    key, model_dir = pytestconfig.getoption("--api-key"), pytestconfig.getoption("--model-dir")
    found = {}
    for name, _, url in (entry.partition("=") for entry in pytestconfig.getoption("--server")):
        nameless = Server(url, key, "", model_dir)
        found[name] = nameless._replace(model=json.loads(nameless.get("/v1/models"))["data"][0]["id"])
    return found


@pytest.fixture
def server(servers: dict[str, Server]) -> Server:
    """The one server given."""
    (only,) = servers.values()
    return only
