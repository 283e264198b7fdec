"""Whether requests can be served now, asked in the background so that a health probe costs nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from gateway.errors import LoadingError
from gateway.scheduler_client import SchedulerClient
from gateway.tokens import ModelInfo
from service_kit.errors import ServiceError, UnavailableError

_POLL_LOADING_S = 0.2
_POLL_READY_S = 1.0
_log = logging.getLogger(__name__)

State = Literal["loading", "ready", "unavailable"]


class Readiness:
    """Follows the scheduler's health. `run` must run as a task."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        """Starts as "loading"."""
        self._scheduler = scheduler
        self._info: ModelInfo | None = None
        self.state: State = "loading"
        """"unavailable" once a scheduler that was ready is not any more."""
        self.listeners: list[Callable[[bool], Awaitable[None]]] = []
        """Told whenever the state turns to ready (True) or away from it."""

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(_POLL_READY_S if self.state == "ready" else _POLL_LOADING_S)

    async def refresh(self) -> None:
        """Asks once."""
        is_serving = await self._scheduler.is_serving()
        if is_serving and self.state != "ready":
            try:
                self._info = await self._scheduler.model_info()  # anew: a restarted scheduler may serve another model
            except ServiceError as error:
                _log.debug("model info: %s", error.message)
                return
            await self._change("ready")
            _log.info("ready: %s, context %d tokens", self._info.model, self._info.max_model_len)
        elif not is_serving and self.state == "ready":
            await self._change("unavailable")
            _log.warning("the scheduler stopped serving")

    async def _change(self, state: State) -> None:
        self.state = state
        for listener in self.listeners:
            await listener(state == "ready")

    def require_info(self) -> ModelInfo:
        """What is served. Raises LoadingError or UnavailableError while nothing is."""
        if self._info is None:
            raise LoadingError("the model is loading: try again in a moment")
        if self.state != "ready":
            raise UnavailableError("the model server is not available now: try again in a moment")
        return self._info
