"""`make clients`: pins, the page about them, and what the runner makes of reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from clients.environments import FOLDER
from clients.run import CLIENTS, Check, checks_of_junit, checks_of_tap
from clients.servers import SERVERS

PAGE = (FOLDER.parents[1] / "docs" / "clients.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*)$", PAGE, re.MULTILINE))


def test_every_client_is_on_the_page() -> None:
    assert set(ROWS) == set(CLIENTS)
    assert {server for servers in CLIENTS.values() for server in servers} == set(SERVERS)


@pytest.mark.parametrize("name", CLIENTS)
def test_versions_are_pinned_and_those_of_the_page(name: str) -> None:
    package = FOLDER / name / "package.json"
    if package.exists():
        versions = json.loads(package.read_text())["dependencies"]
    else:
        lines = (FOLDER / name / "requirements.txt").read_text().split()
        versions = dict(line.split("==") for line in lines)
    assert all(re.fullmatch(r"[0-9.]+", version) for version in versions.values())
    named = re.findall(r" ([0-9]+\.[0-9]+\.[0-9]+)", ROWS[name].split("|")[0])
    assert named
    assert set(named) <= set(versions.values())


def test_reports_become_checks(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert list(checks_of_junit(report)) == []
    report.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><system-out>x</system-out></testcase>"
        "<testcase name='c'><failure message='no&#10;more'/></testcase>"
        "<testcase name='d'><error message='e'/></testcase>"
        "<testcase name='f'><skipped message='no tool'/></testcase></testsuite></testsuites>"
    )
    assert list(checks_of_junit(report)) == [
        Check("a", "passed"),
        Check("b", "passed"),
        Check("c", "failed", "no"),
        Check("d", "failed", "e"),
        Check("f", "skipped", "no tool"),
    ]
    output = "TAP version 13\n# Subtest: x\nok 1 - chat\n  ---\nnot ok 2 - a - b\nok 3 - c # SKIP no tool\n# pass 1\n"
    assert list(checks_of_tap(output)) == [
        Check("chat", "passed"),
        Check("a - b", "failed"),
        Check("c", "skipped", "no tool"),
    ]
