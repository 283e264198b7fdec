"""docs/gpu.md tells of every Triton kernel which tests launch it in the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BEGIN, _END = "<!-- interpreter coverage -->\n", "<!-- end of interpreter coverage -->\n"


def test_every_kernel_is_in_the_table() -> None:
    sources = [*ROOT.glob("kernels/*/triton.py"), *ROOT.glob("kernels/triton/*.py")]
    kernels = {name for path in sources for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    kernels.remove("add_one_kernel")  # tries whether Triton works at all
    text = (ROOT / "docs" / "gpu.md").read_text()
    table = text[text.index(_BEGIN) : text.index(_END)]
    cases = {name: int(count) for name, count in re.findall(r"^\| (\w+_kernel) \| (\d+) \|", table, re.M)}
    assert set(cases) == kernels, "run tests/kernels/interpreter_coverage.py and put its table there"
    assert all(cases.values())
