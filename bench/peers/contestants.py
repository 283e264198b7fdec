"""All engines of a run, started once and kept: our server in its modes, then the peers that start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from bench.measure import Engine, GroupResult
from bench.peers.catalog import PeerSpec, WorkerOptions, start
from bench.peers.worker import PeerError, PeerPrompt
from bench.prompts import Prompt
from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import StopRequest
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings


class Contestant(Protocol):
    """An engine that is measured."""

    name: str
    facts: dict[str, Any]

    def run_group(self, prompts: Sequence[PeerPrompt], concurrency: int, max_tokens: int) -> GroupResult:
        """Greedy answers of exactly `max_tokens` tokens to all prompts at once. Raises PeerError or ServerError."""

    def close(self) -> None:
        """Ends it."""


class OurServer:
    """Our server in one verify mode, over HTTP as its clients use it."""

    def __init__(self, engine: Engine, facts: dict[str, Any]) -> None:
        """`engine` is connected to a server that is ready."""
        self.name, self.facts, self._engine = engine.mode, facts, engine

    def run_group(self, prompts: Sequence[PeerPrompt], concurrency: int, max_tokens: int) -> GroupResult:
        parameters = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        turns = [Prompt(prompt.prompt_class, prompt.text) for prompt in prompts]
        result = self._engine.run_group(turns, concurrency, parameters)
        for prompt, answer in zip(prompts, result.answers, strict=True):
            if (answer.num_prompt_tokens, answer.num_tokens) != (len(prompt.token_ids), max_tokens):
                raise PeerError(
                    f"{self.name}: {answer.num_prompt_tokens} prompt and {answer.num_tokens} answer tokens, expected "
                    f"{len(prompt.token_ids)} and {max_tokens}: the engines would not do the same work"
                )
        return result

    def close(self) -> None:
        self._engine.close()


@contextlib.contextmanager
def our_servers(
    modes: Sequence[str],
    concurrency: int,
    pair: ModelPair,
    common: CommonSettings,
    settings: LauncherSettings,
    stop: StopRequest,
) -> Iterator[list[Contestant]]:
    """One warm server per verify mode, for `concurrency` requests at once.

    Raises ConfigurationError, ServiceDiedError.
    """
    with contextlib.ExitStack() as stack:
        servers: list[Contestant] = []
        for mode in modes:
            serve = ServeOptions(port=free_port_pair(), verify_mode=mode, max_num_seqs=concurrency)
            running = stack.enter_context(running_server(serve, pair, common=common, settings=settings, stop=stop))
            if running is None:
                raise ConfigurationError("interrupted while the servers were starting")
            engine = Engine(mode, running.url, running.run_dir)
            stack.callback(engine.close)
            servers.append(OurServer(engine, {"note": "this project, four processes, over HTTP"}))
        yield servers


@contextlib.contextmanager
def running_peers(
    specs: Sequence[PeerSpec], options: WorkerOptions, failures: dict[str, str]
) -> Iterator[list[Contestant]]:
    """The peers that start; why the others do not goes to `failures`."""
    with contextlib.ExitStack() as stack:
        peers: list[Contestant] = []
        for spec in specs:
            try:
                worker = start(spec, options)
            except PeerError as error:
                failures[spec.name] = str(error)
                continue
            stack.callback(worker.close)
            worker.facts["note"] = spec.note
            peers.append(worker)
        yield peers
