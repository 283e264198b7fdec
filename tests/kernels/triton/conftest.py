"""Runs this folder's tests in Triton's interpreter, all of them in one process of their own.

Triton reads TRITON_INTERPRET when a kernel is decorated: a process has the interpreter or the compiler. So this one
only collects; the first test to run starts a second pytest over what was chosen, and every test here has the outcome
that it had there. With TRITON_INTERPRET=1 in the environment the tests run where they are.

Files are called test_triton_<operation>.py: names of test modules are unique in the whole tree. A package here would
hide Triton itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_FOLDER = Path(__file__).parent
_REPORT = "TRITON_TEST_REPORT"
"""Environment variable: the file to which the second process writes its outcomes."""
_IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
_OUTCOMES = pytest.StashKey[dict[str, tuple[str, str]]]()

try:
    import triton.language  # noqa: F401 - the namespace package that this folder may look like has none
except ImportError:
    collect_ignore_glob = ["test_*.py"]


def pytest_collect_file(file_path: Path) -> None:
    """Refuses a name that clashes with the one of another folder's test."""
    if _FOLDER in file_path.parents and file_path.match("test_*.py") and not file_path.match("test_triton_*.py"):
        raise pytest.UsageError(f"rename {file_path} to test_triton_{file_path.name.removeprefix('test_')}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Takes a test's outcome from the process that interprets."""
    if _IS_INTERPRETER:
        return None
    stash = pyfuncitem.session.stash
    if _OUTCOMES not in stash:
        stash[_OUTCOMES] = _interpret(pyfuncitem.session)
    outcome, text = stash[_OUTCOMES].get(pyfuncitem.nodeid, ("failed", "the interpreter's process did not run it"))
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the second process: a line for a call, and for a set-up or end that did not pass."""
    if _REPORT in os.environ and (report.when == "call" or not report.passed):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        with Path(os.environ[_REPORT]).open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome, text]) + "\n")


def _interpret(session: pytest.Session) -> dict[str, tuple[str, str]]:
    """Outcome and text of each chosen test of this folder; all have failed if the process was no good."""
    chosen = [item.nodeid for item in session.items if _FOLDER in item.path.parents]
    with TemporaryDirectory() as directory:
        report, arguments = Path(directory, "report"), Path(directory, "arguments")
        report.touch()
        arguments.write_text("\n".join(chosen), encoding="utf-8")
        environment = {**os.environ, "TRITON_INTERPRET": "1", _REPORT: str(report)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"@{arguments}"]
        run = subprocess.run(
            command, cwd=session.config.rootpath, env=environment, capture_output=True, text=True, check=False
        )
        lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    outcomes: dict[str, tuple[str, str]] = {}
    for nodeid, outcome, text in lines:
        if outcomes.get(nodeid, ("",))[0] != "failed":
            outcomes[nodeid] = outcome, text
    if run.returncode not in (0, 1):
        reason = f"the interpreter's pytest ended with {run.returncode}:\n{run.stdout[-4000:]}{run.stderr[-2000:]}"
        return dict.fromkeys(chosen, ("failed", reason))
    return outcomes
