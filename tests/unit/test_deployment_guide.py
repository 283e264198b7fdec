"""docs/deployment.md: its commands name files, profiles, services and variables that exist."""

from __future__ import annotations

import re
import shlex

import pytest
from compose_file import ROOT, load_project, variables_of
from typer.main import get_command

from launcher.cli import app
from launcher.settings import LauncherSettings

GUIDE = (ROOT / "docs" / "deployment.md").read_text()
COMMANDS = re.findall(r"^(?:[A-Z_]+=\S+ )*docker compose .+$|(?<=`)docker compose [^`]+(?=`)", GUIDE, re.MULTILINE)
OVERRIDES = sorted(path.name for path in ROOT.glob("compose*.yaml"))
WITH_SERVICES = ("logs", "restart")
WITHOUT = ("up", "config", "down", "stop", "build")
FLAGS = {"--detach", "--wait", "--quiet", "--follow"}


@pytest.mark.parametrize("command", COMMANDS)
def test_compose_commands_name_what_exists(command: str) -> None:
    words = shlex.split(command)
    while "=" in words[0]:
        assert words.pop(0).partition("=")[0] in _variables()
    assert words[:2] == ["docker", "compose"]
    arguments = iter(words[2:])
    subcommand = ""
    for word in arguments:
        if word == "-f":
            assert (ROOT / next(arguments)).is_file()
        elif word == "--profile":
            profiles = [service.get("profiles", []) for service in load_project("compose.yaml")["services"].values()]
            assert [next(arguments)] in profiles
        elif word == "--project-name":
            assert next(arguments)
        elif not subcommand and not word.startswith("-"):
            subcommand = word
            assert subcommand in (*WITH_SERVICES, *WITHOUT)
        elif word.startswith("-"):
            assert word in FLAGS
        else:
            assert subcommand in WITH_SERVICES
            assert word in load_project("compose.yaml")["services"]


def _variables() -> set[str]:
    return set().union(*(variables_of(name) for name in (*OVERRIDES, ".env.example"))) | {
        match[1] for match in re.finditer(r"^#([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE)
    }


def test_variables_and_files_of_the_guide_exist() -> None:
    assert len(COMMANDS) > 10
    named = set(re.findall(r"(?<![A-Z_])([A-Z][A-Z_]+)=", GUIDE)) | set(re.findall(r"`([A-Z]+_[A-Z_]+)`", GUIDE))
    assert {name for name in named if not name.startswith("DSPARK_")} <= _variables()
    links = re.findall(r"\]\(([^)#]+)", GUIDE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_unit_lets_the_launcher_stop_its_services_in_order() -> None:
    unit = (ROOT / "docs" / "examples" / "dspark.service").read_text()
    longest_s = 3 * LauncherSettings().stop_timeout_s  # gateway, scheduler, executors, one after the other
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop
    assert int(stop[1]) > longest_s
    assert "\nKillMode=mixed\n" in unit  # the signal goes to the launcher alone
    command = re.search(r"^ExecStart=\S+/dspark (serve .*)$", unit, re.MULTILINE)
    assert command
    options = set(re.findall(r"--[a-z-]+", command[1]))
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert options <= {option for parameter in serve.params for option in parameter.opts}
    for line in (
        "DSPARK_RUN_DIR=/run/dspark DSPARK_CACHE_DIR=/var/cache/dspark",
        "RuntimeDirectory=dspark",
        "CacheDirectory=dspark",
    ):
        assert f"{line}\n" in unit
