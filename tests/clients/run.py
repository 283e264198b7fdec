"""Runs independent clients against real servers: `make clients`, ARGS="openai_python lm_eval" to choose.

Each client has an environment of its own with pinned versions. Exit code 1 if a check failed; what cannot run here, for
want of a tool or a package, is skipped and says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from clients import node_client
from clients.environments import FOLDER, ensure_environment
from clients.servers import API_KEY, Served, Servers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service_kit.settings import CommonSettings

CLIENTS = {
    "http": ("embedded",),
    "openai_python": ("embedded",),
    "ai_sdk": ("embedded",),
    "langchain": ("embedded",),
    "guidellm": ("embedded",),
    "lm_eval": ("off", "static"),
    "schemathesis": ("tiny",),
}
"""Names of their folders, and the servers that each needs."""
_TIMEOUT_S = 1200


class Check(NamedTuple):
    """One thing a client was seen to do, or not."""

    name: str
    outcome: str
    """passed, failed or skipped."""
    detail: str = ""


def run_client(name: str, servers: Servers) -> list[Check]:
    """All checks of one client; what they print goes to the terminal."""
    is_node = (FOLDER / name / "package.json").exists()
    if is_node and (reason := node_client.missing_tool()):
        return [Check("all", "skipped", reason)]
    cache_dir = CommonSettings().cache_dir
    try:
        installed = node_client.install(name, cache_dir) if is_node else ensure_environment(name, cache_dir)
    except (subprocess.SubprocessError, OSError) as error:
        words = str(getattr(error, "stderr", "") or error).strip()
        return [Check("all", "skipped", f"its packages cannot be installed: {words[-200:]}")]
    served = {each: servers.get(each) for each in CLIENTS[name]}
    try:
        checks = _run_node(name, served) if is_node else _run_pytest(name, installed, served)
    except subprocess.TimeoutExpired as error:
        return [Check("all", "failed", f"not done after {error.timeout:.0f} s")]
    return checks or [Check("all", "failed", "it did not run")]


def _run_node(name: str, served: dict[str, Served]) -> list[Check]:
    (server,) = served.values()
    result = node_client.run(name, CommonSettings().cache_dir, f"{server.url}/v1", server.model, API_KEY)
    print(result.stdout, result.stderr, sep="")
    return list(checks_of_tap(result.stdout))


def _run_pytest(name: str, python: Path, served: dict[str, Served]) -> list[Check]:
    model_dir = next(iter(served.values())).model_dir
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [str(python), "-m", "pytest", "-c", str(FOLDER / "pytest.ini"), f"--junitxml={report}", "-rP"]
        command += [f"--basetemp={directory}/tmp", str(FOLDER / name / "checks.py"), "--api-key", API_KEY]
        command += ["--model-dir", str(model_dir)]
        command += [word for each, server in served.items() for word in ("--server", f"{each}={server.url}")]
        subprocess.run(command, timeout=_TIMEOUT_S, check=False)
        return list(checks_of_junit(report))


def checks_of_junit(report: Path) -> Iterator[Check]:
    """What pytest wrote; nothing if it did not."""
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        problem = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            yield Check(case.get("name", ""), "passed")
        else:
            outcome = "skipped" if problem.tag == "skipped" else "failed"
            yield Check(case.get("name", ""), outcome, problem.get("message", "").partition("\n")[0])


def checks_of_tap(output: str) -> Iterator[Check]:
    """What node's test runner wrote."""
    for line in output.splitlines():
        if line.startswith(("ok ", "not ok ")):
            name, _, skipped = line.partition(" - ")[2].partition(" # SKIP")
            outcome = "skipped" if skipped else "passed" if line.startswith("ok ") else "failed"
            yield Check(name, outcome, skipped.strip())


def main() -> int:
    """Runs the clients named on the command line, or all; prints a table."""
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; all by default")
    chosen = parser.parse_args().clients or list(CLIENTS)
    if unknown := [name for name in chosen if name not in CLIENTS]:
        parser.error(f"no such client: {', '.join(unknown)} (there are {', '.join(CLIENTS)})")
    console = Console()
    table = Table("client", "check", "outcome", "", box=None)
    outcomes: list[str] = []
    with Servers() as servers:
        for name in chosen:
            console.rule(name)
            started = time.monotonic()
            for index, check in enumerate(run_client(name, servers)):
                colour = {"passed": "green", "failed": "red"}.get(check.outcome, "yellow")
                shown = f"[{colour}]{check.outcome}[/]"
                title, detail = escape(check.name.removeprefix("test_")), escape(check.detail[:100])
                table.add_row("" if index else name, title, shown, detail)
                outcomes.append(check.outcome)
            table.add_row("", f"[dim]{time.monotonic() - started:.0f} s[/]")
    console.print(table)
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped")))
    return 1 if "failed" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
