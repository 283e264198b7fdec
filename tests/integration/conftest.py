"""Real servers on the embedded target, one a verify mode, started when first asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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

ServerOf = Callable[[str], RunningServer]
EngineOf = Callable[[str], Engine]


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
def server_of(common: CommonSettings, pair: ModelPair) -> Iterator[ServerOf]:
    """Servers by verify mode, or "one-process" (compact); all live until the session ends."""
    servers: dict[str, RunningServer] = {}
    with contextlib.ExitStack() as stack:

        def get(mode: str) -> RunningServer:
            if mode not in servers:
                options = ServeOptions(
                    port=free_port_pair(),
                    verify_mode="compact" if mode == "one-process" else mode,
                    max_num_seqs=MAX_NUM_SEQS,
                    kv_memory="256MiB",
                    in_process=mode == "one-process",
                )
                context = running_server(options, pair, common=common, settings=LauncherSettings(), stop=StopRequest())
                server = stack.enter_context(context)
                assert server is not None
                servers[mode] = server
            return servers[mode]

        yield get


@pytest.fixture(scope="session")
def engine_of(server_of: ServerOf) -> Iterator[EngineOf]:
    """Measuring clients of the servers; at the end every slot and page must be free again."""
    engines: dict[str, Engine] = {}

    def get(mode: str) -> Engine:
        if mode not in engines:
            server = server_of(mode)
            engines[mode] = Engine(mode, server.url, server.run_dir)
        return engines[mode]

    yield get
    for engine in engines.values():
        load = engine.load()
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
