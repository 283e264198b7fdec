"""Supervision of processes: death, stop, and what is left when the launcher itself is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.processes import ServiceProcess
from launcher.services import ServicePlan
from launcher.settings import LauncherSettings
from launcher.supervisor import ServiceDiedError, StopRequest, Supervisor, new_log_dir

_TESTS = Path(__file__).parents[1]
_URL = "http://127.0.0.1:9"  # nothing listens there


def _plan(name: str, behaviour: str) -> ServicePlan:
    environment = {"FAKE_BEHAVIOUR": behaviour, "PYTHONPATH": str(_TESTS)}
    return ServicePlan(name, "fakes.service", "", environment)


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    """False for a zombie too: in a container nobody may reap orphans."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _supervisor(tmp_path: Path, *plans: ServicePlan, stop_timeout_s: float = 5.0) -> Supervisor:
    settings = LauncherSettings(stop_timeout_s=stop_timeout_s)
    return Supervisor(plans, tmp_path / "run", tmp_path / "logs", settings)


def test_a_dead_service_is_reported_with_name_log_and_last_lines(tmp_path: Path) -> None:
    supervisor = _supervisor(tmp_path, _plan("verifier", "die"), _plan("gateway", "serve"))
    supervisor.start()
    try:
        with pytest.raises(ServiceDiedError) as caught:
            supervisor.wait_ready(_URL, StopRequest(), lambda name: None)
    finally:
        supervisor.stop()
    message = str(caught.value)
    assert "verifier ended (exit code 3)" in message
    assert str(tmp_path / "logs" / "verifier.log") in message
    assert "cannot go on: out of luck" in message


def test_a_killed_service_is_reported_by_signal(tmp_path: Path) -> None:
    supervisor = _supervisor(tmp_path, _plan("drafter", "serve"))
    supervisor.start()
    try:
        os.kill(supervisor.processes["drafter"].pid, signal.SIGKILL)
        with pytest.raises(ServiceDiedError, match=r"drafter ended \(signal SIGKILL\)"):
            supervisor.watch(StopRequest())
    finally:
        supervisor.stop()


def test_start_timeout_names_the_service_and_the_setting(tmp_path: Path) -> None:
    settings = LauncherSettings(start_timeout_s=0.3)
    supervisor = Supervisor([_plan("gateway", "serve")], tmp_path / "run", tmp_path / "logs", settings)
    supervisor.start()
    try:
        with pytest.raises(ServiceDiedError, match=r"gateway was not ready .*DSPARK_LAUNCHER_START_TIMEOUT_S"):
            supervisor.wait_ready(_URL, StopRequest(), lambda name: None)
    finally:
        supervisor.stop()


def test_stop_ends_gateway_first_and_executors_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("verifier", "drafter", "scheduler", "gateway")
    supervisor = _supervisor(tmp_path, *(_plan(name, "serve") for name in names))
    supervisor.start()
    pids = {name: supervisor.processes[name].pid for name in names}
    supervisor._ready.update(names)  # as after a start; services that still load are told all at once
    stopped: list[str] = []
    wait_or_kill = ServiceProcess.wait_or_kill

    def recording_wait(process: ServiceProcess, *args: Any) -> None:
        assert not stopped or supervisor.processes[stopped[-1]].exit_code is not None
        stopped.append(process.name)
        wait_or_kill(process, *args)

    monkeypatch.setattr(ServiceProcess, "wait_or_kill", recording_wait)
    supervisor.stop()
    assert stopped == ["gateway", "scheduler", "drafter", "verifier"]
    assert not any(_is_running(pid) for pid in pids.values())


def test_a_service_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    supervisor = _supervisor(tmp_path, _plan("scheduler", "ignore"), stop_timeout_s=0.2)
    supervisor.start()
    process = supervisor.processes["scheduler"]
    _wait_for(lambda: bool(process.last_lines()), "it runs")
    supervisor.stop()
    assert process.exit_code == -signal.SIGKILL


def test_a_second_signal_ends_the_wait(tmp_path: Path) -> None:
    supervisor = _supervisor(tmp_path, _plan("scheduler", "ignore"), stop_timeout_s=600)
    supervisor.start()
    supervisor._ready.add("scheduler")  # one that loads is not waited for anyway
    process = supervisor.processes["scheduler"]
    _wait_for(lambda: bool(process.last_lines()), "it runs")
    request = StopRequest()
    request.request()
    request.request()
    supervisor.stop(request)
    assert process.exit_code == -signal.SIGKILL


def test_services_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """Nothing runs on after SIGKILL to the launcher, and its run directory goes too."""
    (tmp_path / "run").mkdir()
    program = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from launcher.supervisor import StopRequest
from unit.test_launcher_processes import _plan, _supervisor

supervisor = _supervisor(Path(sys.argv[1]), _plan("verifier", "serve"), _plan("drafter", "serve"))
supervisor.start()
print(*(process.pid for process in supervisor.processes.values()), flush=True)
supervisor.watch(StopRequest())
"""
    command = [sys.executable, "-c", program, str(tmp_path), str(_TESTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        for name in ("verifier", "drafter"):
            log = tmp_path / "logs" / f"{name}.log"
            _wait_for(lambda log=log: "started" in log.read_text(), f"{name} runs")  # type: ignore[misc]
        launcher.kill()
    assert len(pids) == 2
    _wait_for(lambda: not any(_is_running(pid) for pid in pids), "the services are gone")
    _wait_for(lambda: not (tmp_path / "run").exists(), "the run directory is gone")


def test_old_logs_are_removed(tmp_path: Path) -> None:
    runs = [new_log_dir(tmp_path, keep=2) for _ in range(4)]
    assert [run.exists() for run in runs] == [False, False, True, True]
