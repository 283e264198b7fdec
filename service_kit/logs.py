"""Log lines for people or for machines: the same events, as text or as one JSON object a line.

What belongs to a line travels in `fields`, never in the message, so that both formats have all of it. Prompts and
answers are no fields of any line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterable
from typing import Any, Literal

LogFormat = Literal["text", "json"]
_TEXT_WARNING = re.compile(r"\d\S* \S+ \S+ WARNING (.*)")


def log_event(logger: logging.Logger, message: str, **fields: Any) -> None:
    """A line of level info with fields; those that are None are left out."""
    logger.info(message, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


def set_up_logs(service: str, level: str, log_format: LogFormat) -> None:
    """Lines of this process go to standard error, in the format asked for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """Time, service, level, message, then the fields as name=value."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without traceback."""
        fields = "".join(f" {name}={value!r}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, service, logger, message, the fields, and a traceback if any."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def warnings_in(lines: Iterable[str]) -> list[str]:
    """Messages of the warnings among lines of a log of either format."""
    found: list[str] = []
    for line in lines:
        if match := _TEXT_WARNING.fullmatch(line):
            found.append(match[1])
        elif line.startswith("{"):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("level") == "warning":
                    found.append(str(entry.get("message")))
    return found
