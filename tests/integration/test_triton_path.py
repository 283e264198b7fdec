"""Captured steps in one process, in Triton's interpreter: the texts of the CPU's reference engine, unseeded ones too.

`test_triton_services` asks four processes; here keys and costs are given, so that even draws are the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pair import make_pair
from triton_path import MODES, NUM_INVARIANT, texts

pytest.importorskip("triton")
TESTS = Path(__file__).parents[1]


def test_texts_of_captured_steps_are_those_of_the_reference(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [sys.executable, str(TESTS / "triton_path.py"), "device"]
    interpreted = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    expected = texts("reference", pair=make_pair(tmp_path))
    output, _ = interpreted.communicate()
    assert interpreted.returncode == 0
    found = json.loads(output)["device"]
    for mode in MODES:
        # Where costs count, what is verified follows the times of steps, and so do an unseeded request's draws.
        count = NUM_INVARIANT if mode in ("compact", "lens") else len(expected[mode])
        assert found[mode][:count] == expected[mode][:count], mode
    for mode in MODES[1:]:
        assert expected[mode][:NUM_INVARIANT] == expected["off"][:NUM_INVARIANT]
