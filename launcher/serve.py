"""`dspark serve`: the server in the foreground, with one ready line."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from launcher.models import ModelPair
from launcher.processes import last_lines
from launcher.services import ServeOptions, kernel_cache
from launcher.settings import LauncherSettings
from launcher.stack import running_server
from launcher.supervisor import stop_on_signals
from scheduler_service.cost_progress import progress_in
from service_kit.logs import warnings_in
from service_kit.settings import CommonSettings

_WARNING_LINES = 200
"""Lines of a service's log that are searched for warnings once it is ready."""


class _StartDisplay:
    """Which services are still loading, and how far the scheduler has got with measuring: a spinner on a terminal,
    plain lines elsewhere."""

    def __init__(self, console: Console, *, is_first: bool) -> None:
        self._note = " (the first start compiles kernels: a minute or two)" if is_first else ""
        self._console, self._status = console, Status(self, console=console)  # drawn anew several times a second
        self._started, self._pending, self._logs = time.monotonic(), list[str](), list[Path]()
        self._log_dir = Path()

    def on_start(self, log_dir: Path, names: list[str]) -> None:
        """Shows where the logs are."""
        self._pending, self._log_dir = list(names), log_dir
        self._logs = [log_dir / f"{name}.log" for name in names if name in ("scheduler", "server")]
        self._console.print(f"logs: {log_dir}{self._note}", style="dim", soft_wrap=True)
        if self._console.is_terminal:
            self._status.start()

    def on_ready(self, name: str) -> None:
        """Shows a service's start time, and what it warned of."""
        self._pending.remove(name)
        self._console.print(f"{name} ready after {self.elapsed_s:.1f} s", style="dim")
        for words in warnings_in(last_lines(self._log_dir / f"{name}.log", _WARNING_LINES)):
            self._console.print(f"{name}: {words}", style="yellow", soft_wrap=True, markup=False)

    def __rich__(self) -> Text:
        """The spinner's words."""
        progress = next((found for log in self._logs if (found := progress_in(last_lines(log, 1)))), "")
        return Text(progress or f"loading {', '.join(self._pending)}{self._note}")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def stop(self) -> None:
        """Ends the spinner."""
        self._status.stop()


def run_serve(options: ServeOptions, pair: ModelPair, common: CommonSettings, settings: LauncherSettings) -> None:
    """Serves until a signal. Raises ConfigurationError or ServiceDiedError."""
    console = Console(stderr=True, highlight=False)
    if pair.note:
        console.print(pair.note, style="yellow", soft_wrap=True)
    display = _StartDisplay(console, is_first=not kernel_cache(common).exists())
    with stop_on_signals() as stop:
        try:
            with running_server(
                options,
                pair,
                common=common,
                settings=settings,
                stop=stop,
                on_start=display.on_start,
                on_ready=display.on_ready,
            ) as server:
                display.stop()
                if server is not None:
                    console.print(ready_line(options, pair, display.elapsed_s), style="bold green", soft_wrap=True)
                    server.supervisor.watch(stop)
                console.print("stopping (again to stop at once)", style="dim")
        finally:
            display.stop()


def ready_line(options: ServeOptions, pair: ModelPair, elapsed_s: float) -> str:
    """The line that says where the server is and how to chat."""
    chat = "dspark chat" if options.url == "http://127.0.0.1:8000" else f"dspark chat --url {options.url}"
    return f"ready in {elapsed_s:.1f} s: {pair.served_name} at {options.url}/v1 · chat: {chat}"
