"""Log lines in both formats, and exporters whose collector is not there."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from service_kit.logs import JsonFormatter, TextFormatter, log_event, warnings_in

_TRACED = """
from opentelemetry import metrics
from service_kit import telemetry
from service_kit.settings import CommonSettings
telemetry.set_up("test", CommonSettings(trace_exporter="otlp", metrics_exporter="otlp"))
with telemetry.tracer().start_as_current_span("a"):
    metrics.get_meter("b").create_histogram("c").record(1.0)
print("served", flush=True)
"""


def _line(formatter: logging.Formatter, message: str = "request ended", **fields: object) -> str:
    records: list[logging.LogRecord] = []
    logger = logging.Logger("dspark.test")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    log_event(logger, message, **fields)
    return formatter.format(records[0])


def test_a_json_line_has_the_message_and_the_fields() -> None:
    line = _line(JsonFormatter("gateway"), request_id='a"\nb', tokens=3, error=None)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "info",
        "service": "gateway",
        "logger": "dspark.test",
        "message": "request ended",
        "request_id": 'a"\nb',
        "tokens": 3,
    }


def test_a_text_line_has_the_same_fields_and_stays_one_line() -> None:
    line = _line(TextFormatter("gateway"), request_id="a\nb", tokens=3, error=None)
    assert line.endswith(" gateway INFO request ended request_id='a\\nb' tokens=3")


@pytest.mark.parametrize("formatter", [JsonFormatter("x"), TextFormatter("x")])
def test_warnings_are_found_in_a_log(formatter: logging.Formatter) -> None:
    levels = {"a WARNING told": logging.INFO, "serving on the CPU": logging.WARNING, "broken": logging.ERROR}
    lines = [
        formatter.format(logging.LogRecord("x", level, "x.py", 1, "%s", (message,), None))
        for message, level in levels.items()
    ]
    assert warnings_in(["{", *lines, "Traceback", ""]) == ["serving on the CPU"]


@pytest.mark.parametrize("formatter", [JsonFormatter("x"), TextFormatter("x")])
def test_a_traceback_is_kept(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    assert "ValueError: why" in formatter.format(record)


def test_a_collector_that_is_away_neither_fails_nor_holds_a_process() -> None:
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    # Its client alone would try for ten seconds and more for each of the two.
    done = subprocess.run([sys.executable, "-c", _TRACED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "served\n"
    assert "Traceback" not in done.stderr
    assert "retrying" not in done.stderr
