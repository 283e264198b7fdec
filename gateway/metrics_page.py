"""`/metrics`: one page with the metrics of all services, so that one port is published and one target scraped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
from prometheus_client import CollectorRegistry

from gateway.metrics import UP
from service_kit.metrics import VLLM_PREFIX, exposition, exposition_of
from service_kit.metrics_rpc import get_metrics
from service_kit.rpc import open_aio_channel

_DEADLINE_S = 1.0
"""For each service: a scrape never waits longer for one that hangs."""
_MAX_BYTES = 4 * 2**20
_log = logging.getLogger(__name__)


class MetricsSource(NamedTuple):
    """A service with metrics of its own."""

    name: str
    address: str
    """Of its gRPC server."""


class MetricsPage:
    """Asks every service at each scrape and merges what they say with the gateway's own numbers."""

    def __init__(
        self,
        registry: CollectorRegistry,
        sources: Sequence[MetricsSource],
        model: str,
        *,
        has_drafter: Callable[[], bool],
    ) -> None:
        """`registry` has the gateway's own metrics. `model` labels the metrics that other servers have too. A drafter
        that does not answer is down only where `has_drafter` says that there is one."""
        self._registry, self._sources, self._has_drafter = registry, sources, has_drafter
        self._labels = f'engine="0",model_name="{_escaped(model)}"'
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def text(self) -> str:
        """The page, in Prometheus's text format. A service that does not answer is told by `dspark_service_up`."""
        answers = await asyncio.gather(*map(self._ask, self._sources))
        is_up = {"gateway": 1}
        for source, answer in zip(self._sources, answers, strict=True):
            if answer is not None or source.name != "drafter" or self._has_drafter():
                is_up[source.name] = int(answer is not None)
        up = exposition_of(UP.by_label({(name,): value for name, value in is_up.items()}))
        return merged([up, exposition(self._registry), *(answer for answer in answers if answer)], self._labels)

    async def _ask(self, source: MetricsSource) -> str | None:
        if source.name not in self._channels:
            self._channels[source.name] = open_aio_channel(source.address, max_message_bytes=_MAX_BYTES)
        try:
            return await get_metrics(self._channels[source.name], _DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            _log.debug("metrics of %s: %s", source.name, error.details())
            return None

    async def close(self) -> None:
        """Releases the connections."""
        for channel in self._channels.values():
            await channel.close()


@dataclass
class _Family:
    name: str
    header: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merged(pages: Iterable[str], vllm_labels: str) -> str:
    """One page of several: every family once, under the header that came first. `vllm_labels` are put before the other
    labels of families that other servers have too."""
    families: dict[str, _Family] = {}
    for page in pages:
        family = _Family("")
        is_new = True
        for line in page.split("\n"):
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                if name != family.name:
                    is_new = name not in families
                    family = families.setdefault(name, _Family(name))
                if is_new:
                    family.header.append(line)
            elif line:
                family.samples.append(_labelled(line, vllm_labels) if family.name.startswith(VLLM_PREFIX) else line)
    return "".join(f"{line}\n" for each in families.values() for line in (*each.header, *each.samples))


def _labelled(sample: str, labels: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{labels},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{labels}}} {value}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
