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
from clients.servers import API_KEY, Servers
from rich.console import Console
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
        if is_node:
            node_client.install(name, cache_dir)
        else:
            python = ensure_environment(name, cache_dir)
    except (subprocess.SubprocessError, OSError) as error:
        words = str(getattr(error, "stderr", "") or error).strip()
        return [Check("all", "skipped", f"its packages cannot be installed: {words[-200:]}")]
    served = {each: servers.get(each) for each in CLIENTS[name]}
    first = next(iter(served.values()))
    if is_node:
        result = node_client.run(name, cache_dir, f"{first.url}/v1", "smollm2-135m-instruct", API_KEY)
        print(result.stdout, result.stderr, sep="")
        return list(_tap(result.stdout)) or [Check("all", "failed", "it did not run")]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [str(python), "-m", "pytest", "-c", str(FOLDER / "pytest.ini"), f"--junitxml={report}", "-rP"]
        command += [f"--basetemp={directory}/tmp", str(FOLDER / name / "checks.py"), "--api-key", API_KEY]
        command += ["--model-dir", str(first.model_dir)]
        command += [word for each, server in served.items() for word in ("--server", f"{each}={server.url}")]
        subprocess.run(command, timeout=_TIMEOUT_S, check=False)
        return list(_junit(report)) or [Check("all", "failed", "it did not run")]


def _junit(report: Path) -> Iterator[Check]:
    if not report.exists():
        return
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next(iter(case), None)
        kind = "passed" if problem is None or problem.tag.startswith("system") else problem.tag
        outcome = {"passed": "passed", "skipped": "skipped"}.get(kind, "failed")
        detail = "" if outcome == "passed" or problem is None else problem.get("message", "")
        yield Check(case.get("name", ""), outcome, detail.splitlines()[0] if detail else "")


def _tap(output: str) -> Iterator[Check]:
    for line in output.splitlines():
        if line.startswith(("ok ", "not ok ")):
            outcome = "passed" if line.startswith("ok ") else "failed"
            yield Check(line.partition(" - ")[2], outcome)


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
                table.add_row("" if index else name, check.name.removeprefix("test_"), shown, check.detail[:100])
                outcomes.append(check.outcome)
            table.add_row("", f"[dim]{time.monotonic() - started:.0f} s[/]")
    console.print(table)
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped")))
    return 1 if "failed" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
