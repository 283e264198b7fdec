"""Whether requests can be served now, asked in the background so that a health probe costs nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from gateway.errors import DrainingError, LoadingError
from gateway.scheduler_client import SchedulerClient
from gateway.tokens import ModelInfo, Progress
from service_kit.errors import ServiceError, UnavailableError

_POLL_LOADING_S = 0.2
_POLL_READY_S = 1.0
_MAX_POLL_S = 10.0
"""Longest time between two answers that counts: beyond it, this process itself did not run."""
_log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stalled", "unavailable", "draining"]


class Readiness:
    """Follows the scheduler's health and progress. `run` must run as a task."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        *,
        stall_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts as "loading". `clock` tells seconds."""
        self._scheduler = scheduler
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._info: ModelInfo | None = None
        self._progress = Progress(0, 0)
        self._asked_s = clock()
        self._quiet_s = 0.0
        """Seconds for which something was to be done and no token came."""
        self.state: State = "loading"
        """"stalled" while requests run and no token comes, "unavailable" once a scheduler that was ready is not any
        more, "draining" when the gateway is about to end."""
        self.listeners: list[Callable[[bool], Awaitable[None]]] = []
        """Told whenever the state turns to ready (True) or away from it."""

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(_POLL_LOADING_S if self.state in ("loading", "unavailable") else _POLL_READY_S)

    async def refresh(self) -> None:
        """Asks once."""
        is_serving = await self._scheduler.is_serving()
        if self.state == "draining":
            return
        if not is_serving:
            if self.state in ("ready", "stalled"):
                await self._change("unavailable")
                _log.warning("the scheduler stopped serving")
        elif self.state in ("ready", "stalled"):
            await self._watch_progress()
        else:
            try:
                self._info = await self._scheduler.model_info()  # anew: a restarted scheduler may serve another model
            except ServiceError as error:
                _log.debug("model info: %s", error.message)
                return
            self._quiet_s, self._asked_s = 0.0, self._clock()
            await self._change("ready")
            _log.info("ready: %s, context %d tokens", self._info.model, self._info.max_model_len)

    async def _watch_progress(self) -> None:
        """Ready or stalled, by tokens. A scheduler that does not say how far it is has not come further."""
        try:
            progress = await self._scheduler.progress()
        except ServiceError as error:
            _log.debug("progress: %s", error.message)
            progress = self._progress
        now = self._clock()
        self._quiet_s += min(now - self._asked_s, _MAX_POLL_S)
        self._asked_s = now
        if progress.num_unfinished == 0 or progress.num_tokens != self._progress.num_tokens:
            self._quiet_s = 0.0
        self._progress = progress
        is_stalled = self._quiet_s > self._stall_timeout_s
        if is_stalled and self.state == "ready":
            _log.error("no token for %.0f s while %d choices run or wait", self._quiet_s, progress.num_unfinished)
            await self._change("stalled")
        elif not is_stalled and self.state == "stalled":
            _log.info("tokens come again")
            await self._change("ready")

    async def drain(self) -> None:
        """From now on requests are refused: the gateway is about to end."""
        await self._change("draining")

    async def _change(self, state: State) -> None:
        if self.state == "draining":
            return
        self.state = state
        for listener in self.listeners:
            await listener(state == "ready")

    @property
    def info(self) -> ModelInfo | None:
        """What was served when last asked; None before."""
        return self._info

    def require_info(self) -> ModelInfo:
        """What is served. Raises LoadingError, DrainingError or UnavailableError while nothing is.

        A stalled server still takes requests: it may come back, and their deadlines end them if it does not.
        """
        if self.state == "draining":
            raise DrainingError("the server is about to end: try again in a moment")
        if self._info is None:
            raise LoadingError("the model is loading: try again in a moment")
        if self.state == "unavailable":
            raise UnavailableError("the model server is not available now: try again in a moment")
        return self._info
