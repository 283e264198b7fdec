"""The servers that clients are run against, started when first asked for."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import NamedTuple

from tiny_target import DRAFTER, TARGET, clone_with_tokenizer

from launcher.models import ModelPair, choose_models
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import StopRequest
from service_kit.settings import CommonSettings

API_KEY = "key-of-the-clients"
KEY_MAX_CONCURRENT = 24


class Sizes(NamedTuple):
    """What tells one server from another."""

    verify_mode: str
    is_tiny: bool = False
    max_num_seqs: int = 16
    max_model_len: int = 2048
    kv_memory: str = "1GiB"


SERVERS = {
    "embedded": Sizes("compact"),
    "static": Sizes("static"),
    "off": Sizes("off"),
    "tiny": Sizes("compact", is_tiny=True, max_model_len=128, kv_memory="64MiB"),
}


class Served(NamedTuple):
    """A server that is ready."""

    url: str
    model: str
    """Its name."""
    model_dir: Path


class Servers(contextlib.ExitStack):
    """All servers asked for; they end with the context."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        super().__init__()
        self._served: dict[str, Served] = {}
        self._cache_dir = CommonSettings().cache_dir

    def get(self, name: str) -> Served:
        """Starts server `name` unless it runs."""
        if name not in self._served:
            self._served[name] = self._start(SERVERS[name])
        return self._served[name]

    def _start(self, sizes: Sizes) -> Served:
        directory = Path(self.enter_context(tempfile.TemporaryDirectory()))
        common, settings = CommonSettings(run_dir=directory / "run"), LauncherSettings()
        keys = directory / "keys"
        keys.write_text(f"{API_KEY}\n")
        if sizes.is_tiny:
            target = directory / "tiny-qwen3"
            target.mkdir()
            clone_with_tokenizer(TARGET, target)
            pair = ModelPair(target, "tiny-qwen3", DRAFTER, "")
        else:
            pair = choose_models(None, None, common, settings)
        options = ServeOptions(
            port=free_port_pair(),
            verify_mode=sizes.verify_mode,
            max_num_seqs=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            kv_memory=sizes.kv_memory,
            api_key_file=keys,
            changes=(("DSPARK_GATEWAY_KEY_MAX_CONCURRENT", str(KEY_MAX_CONCURRENT)),),
        )
        server = self.enter_context(running_server(options, pair, common=common, settings=settings, stop=StopRequest()))
        assert server is not None
        return Served(server.url, pair.served_name, pair.target)
