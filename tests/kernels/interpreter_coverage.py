"""Which Triton kernels the interpreter's tests launch, and in how many cases: the table of docs/gpu.md.

    TRITON_INTERPRET=1 python -m pytest -q -p tests.kernels.interpreter_coverage tests/kernels/triton

A plugin of pytest. It notes launches and runs none, so that it takes seconds: cases fail, and of each counts what it
launches before it looks at results. What is printed is at least what the tests cover.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction

_kernels_by_case: dict[str, set[str]] = defaultdict(set)
_case = ""


def _note(self: Any, *args: Any, **options: Any) -> None:
    _kernels_by_case[_case].add(self.fn.__name__)


InterpretedFunction.run = _note


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Remembers whose launches come now; that the case fails then is no matter."""
    global _case
    _case = item.nodeid
    try:
        yield
    except Exception:
        return


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the table."""
    terminalreporter.write_line(as_markdown(_kernels_by_case))


def as_markdown(kernels_by_case: Mapping[str, set[str]]) -> str:
    """A line a kernel: its cases, and by test how many."""
    tests: dict[str, Counter[str]] = defaultdict(Counter)
    for case, kernels in kernels_by_case.items():
        for kernel in kernels:
            tests[kernel][case.rpartition("::")[2].partition("[")[0].removeprefix("test_")] += 1
    lines = ["| kernel | cases | tests |", "|---|---:|---|"]
    for kernel, counts in sorted(tests.items()):
        if kernel.startswith("_"):
            continue  # a test's own, around a part of a kernel
        words = ", ".join(f"{test} ({count})" if count > 1 else test for test, count in sorted(counts.items()))
        lines.append(f"| {kernel} | {sum(counts.values())} | {words} |")
    return "\n".join(lines)
