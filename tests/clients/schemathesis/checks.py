"""schemathesis on /openapi.json: no status that is not described, none of 500 and more, errors of one shape."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from server_options import Server

HERE = Path(__file__).parent
PYTHON_BUG = "AST constructor recursion depth mismatch"
"""What CPython 3.11 says at times when hypothesis reads the source of a lambda deep within calls: a case that was never
sent."""


def test_openapi_holds(server: Server, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(f'hooks = "{HERE / "hooks.py"}"\n')
    command = [str(Path(sys.executable).parent / "st"), "--config-file", str(tmp_path / "schemathesis.toml"), "run"]
    command += [f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {server.api_key}"]
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    command += ["--max-examples", "60", "--seed", "1", "--max-time", "180", "--workers", "2"]
    command += ["--generation-database", "none", "--request-timeout", "60", "--continue-on-failure"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    print(result.stdout, result.stderr)
    errors = sum(map(int, re.findall(r"Runtime Error: (\d+)", result.stdout)))
    is_tools_own = 0 < errors == result.stdout.count(f"SystemError: {PYTHON_BUG}") and " FAILURES " not in result.stdout
    assert result.returncode == 0 or is_tools_own, "see above"
    assert re.search(r"(\d{3,}) generated, \1 passed", result.stdout)
