"""When each phase of each step began and ended, as JSON lines, for timelines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from scheduler_service.executor_types import Phase
from service_kit.errors import ConfigurationError


class StepTrace:
    """Appends to a file; without one it does nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigurationError if the file cannot be written."""
        try:
            self._file = path.open("a", encoding="utf-8") if path is not None else None
        except OSError as error:
            raise ConfigurationError(
                f"trace_steps: {error}: set DSPARK_SCHEDULER_TRACE_STEPS to a file that can be written",
                field="trace_steps",
            ) from error

    def record(self, step_id: int, phases: Iterable[Phase]) -> None:
        """One line a phase."""
        if self._file is None:
            return
        for name, start_ns, end_ns in phases:
            line = {"step_id": step_id, "phase": name, "start_ns": start_ns, "end_ns": end_ns}
            self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
