"""Runs a client written in JavaScript: `python tests/clients/node_client.py ai_sdk BASE_URL MODEL [API_KEY]`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
_FILES = ("package.json", "package-lock.json")


def missing_tool() -> str:
    """Why no such client can run here; empty if one can."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not installed: apt install nodejs npm" if missing else ""


def install(client: str, cache_dir: Path) -> Path:
    """A directory outside the tree with the client's pinned packages and its test. Reused while the pins are the same.

    Raises CalledProcessError when npm cannot fetch them.
    """
    source = FOLDER / client
    pins = b"".join((source / name).read_bytes() for name in _FILES)
    directory = cache_dir / "node-clients" / f"{client}-{hashlib.sha256(pins).hexdigest()[:16]}"
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*_FILES, "test.mjs"):
        shutil.copyfile(source / name, directory / name)
    done = directory / "installed"
    if not done.exists():
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True, timeout=300)
        done.touch()
    return directory


def run(client: str, cache_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Installs and runs the client's test; its report is in the result's stdout."""
    directory = install(client, cache_dir)
    command = ["node", "test.mjs", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600)


if __name__ == "__main__":
    if reason := missing_tool():
        sys.exit(reason)
    result = run(sys.argv[1], Path.home() / ".cache" / "dspark", *sys.argv[2:])
    print(result.stdout, result.stderr, sep="")
    sys.exit(result.returncode)
