"""Virtual environments of the clients, outside the tree: one a client, made of its pinned requirements."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
_INSTALL_TIMEOUT_S = 1800


def ensure_environment(client: str, cache_dir: Path) -> Path:
    """Python of the client's environment, made when its requirements are new. Raises CalledProcessError."""
    requirements = FOLDER / client / "requirements.txt"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    directory = cache_dir / "clients" / client
    python, installed = directory / "bin" / "python", directory / "installed"
    if not installed.is_file() or installed.read_text() != wanted:
        is_old = ["--clear"] if installed.is_file() else []  # what an interrupted run installed is good
        _run([sys.executable, "-m", "venv", *is_old, str(directory)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _run([*pip, "--requirement", str(requirements)])
        installed.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
