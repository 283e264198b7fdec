"""The embedded target and a real server on it, started when first asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.measure import Engine
from launcher.embedded import embedded_dir, is_ready
from launcher.models import ModelPair, choose_models
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import RunningServer, running_server
from launcher.supervisor import StopRequest
from service_kit.settings import CommonSettings

MAX_NUM_SEQS = 8


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> CommonSettings:
    """The user's cache, and a run directory of the test session's own."""
    return CommonSettings(run_dir=tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def pair(common: CommonSettings) -> ModelPair:
    """The embedded target and its drafter."""
    if not is_ready(embedded_dir(common.cache_dir)):
        pytest.skip("needs the embedded target: run `make setup`")
    return choose_models(None, None, common, LauncherSettings())


@pytest.fixture(scope="session")
def server(common: CommonSettings, pair: ModelPair) -> Iterator[RunningServer]:
    """Lives until the session ends."""
    options = ServeOptions(port=free_port_pair(), verify_mode="compact", max_num_seqs=MAX_NUM_SEQS, kv_memory="256MiB")
    with running_server(options, pair, common=common, settings=LauncherSettings(), stop=StopRequest()) as server:
        assert server is not None
        yield server


@pytest.fixture(scope="session")
def engine(server: RunningServer) -> Iterator[Engine]:
    """Measuring client of the server; at the end every slot and page must be free again."""
    engine = Engine("compact", server.url, server.run_dir)
    yield engine
    deadline = time.monotonic() + 10
    while (load := engine.load()).num_free_slots < load.num_slots and time.monotonic() < deadline:
        time.sleep(0.02)  # the drafter may still ingest what the last answer left
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert (load.num_free_slots, load.num_free_pages) == (load.num_slots, load.num_pages)
    engine.close()


def processes_of(run_dir: Path) -> list[int]:
    """Processes whose command line names a directory below `run_dir`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if str(run_dir).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
