"""Compiles every Triton kernel for GPUs that are not here, and says what each takes of a multiprocessor.

    python -m kernels.aot [--targets 80,90] [--only paged_attention]

Operations are called as an engine calls them, on tensors without memory (`device="meta"`); their launches compile and
stop. So what is compiled is what would run: the operation's own tiles, warps and specialisations. An operation that
needed a value from the device (a synchronisation, which no captured step may hold) fails here too.

Needs a process of its own without TRITON_INTERPRET: Triton decides what a kernel is when it is decorated.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from kernels.aot_cases import CASES, models_of
from kernels.aot_index import narrow_factors

TARGETS = (80, 90)
"""Compute capabilities, times ten: A100 and H100 / H200."""
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one block may have."""
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    operation: str
    model: str
    kernel: str
    target: int
    """Compute capability times ten."""
    num_warps: int
    num_stages: int
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread: registers that were moved to memory, and arrays that never were in registers."""
    shared_bytes: int
    """Of a block."""
    narrow_factors: frozenset[str]
    """See `kernels.aot_index`."""


class _NoDevice(DriverBase):  # type: ignore[misc]
    """Stands in for the driver of a GPU that is not there: kernels can be compiled for it and not launched."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(ty)

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels compiled for another target are kept apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Within it, a launch compiles for that target and goes no further; the list collects (kernel, compiled)."""
    if not isinstance(triton.jit(_probe), JITFunction):
        raise RuntimeError("this process interprets kernels (TRITON_INTERPRET): compile in another one")
    compiled: list[Any] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        options.setdefault("enable_fp_fusion", True)  # Triton's default, said here lest it warns of a change to come
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(_NoDevice(capability))
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        triton.runtime.driver._active = None


def _probe() -> None:
    """What decorating it makes tells the compiler from the interpreter."""


def usages(
    operations: Sequence[str] = tuple(CASES), models: Collection[str] = (), targets: Sequence[int] = TARGETS
) -> Iterator[Usage]:
    """Compiles the kernels that `operations` launch, at the shapes of `models` or at all that concern them; each
    different one is told once."""
    seen = set()
    for target in targets:
        for operation in operations:
            for model, shapes in models_of(operation).items():
                if models and model not in models:
                    continue
                with compiling_for(target) as compiled:
                    CASES[operation](shapes)
                if not compiled:
                    raise RuntimeError(f"{operation} launches no kernel")
                for name, kernel in compiled:
                    if (target, kernel.hash) not in seen:
                        seen.add((target, kernel.hash))
                        yield _usage(operation, model, name, target, kernel)


def _usage(operation: str, model: str, name: str, target: int, kernel: Any) -> Usage:
    registers, stack = resource_usage(kernel.asm["cubin"])
    metadata = kernel.metadata
    return Usage(
        operation,
        model,
        name,
        target,
        metadata.num_warps,
        metadata.num_stages,
        registers,
        stack,
        metadata.shared,
        narrow_factors(kernel.asm["ttir"]),
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, which is where spilled ones go."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = _USAGE.search(told)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {told}")
    return int(found[1]), int(found[2])


def as_markdown(rows: Sequence[Usage]) -> str:
    """The table, one line a kernel: the most that any of its specialisations takes, for each target."""
    targets = sorted({row.target for row in rows})
    kernels: dict[tuple[str, str], list[Usage]] = {}
    for row in rows:
        kernels.setdefault((row.operation, row.kernel), []).append(row)
    head = "".join(f" sm_{target}: registers | spilled bytes | shared KiB |" for target in targets)
    lines = [f"| operation | kernel | warps |{head}", "|---|---|---:|" + "---:|" * 3 * len(targets)]
    for (operation, kernel), own in sorted(kernels.items()):
        line = f"| {operation} | {kernel} | {own[0].num_warps} |"
        for target in targets:
            there = [row for row in own if row.target == target]
            most = (max(getattr(row, name) for row in there) for name in ("registers", "spilled_bytes", "shared_bytes"))
            registers, spilled, shared = most
            line += f" {registers} | {spilled} | {shared / 1024:.1f} |"
        lines.append(line)
    return "\n".join(lines)


def heads_markdown(rows: Sequence[Usage]) -> str:
    """The same of the kernels of attention that depend on the heads most, one line a kernel and shape."""
    own = [row for row in rows if row.kernel in ("attend_kernel", "block_attend_kernel")]
    shapes: dict[tuple[str, str], list[Usage]] = {}
    for row in own:
        shapes.setdefault((row.model, row.kernel), []).append(row)
    targets = sorted({row.target for row in own})
    head = "".join(f" sm_{target}: registers | spilled bytes |" for target in targets)
    lines = [f"| shape | kernel |{head}", "|---|---|" + "---:|" * 2 * len(targets)]
    for (model, kernel), same in shapes.items():
        line = f"| {model} | {kernel} |"
        for target in targets:
            there = [row for row in same if row.target == target]
            line += f" {max(row.registers for row in there)} | {max(row.spilled_bytes for row in there)} |"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(prog="python -m kernels.aot")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="compute capabilities times ten")
    parser.add_argument("--only", default=",".join(CASES), help="operations")
    options = parser.parse_args(arguments)
    targets = [int(target) for target in options.targets.split(",")]
    rows = list(usages(options.only.split(","), targets=targets))
    print(as_markdown(rows))
    print()
    print(heads_markdown(rows))


if __name__ == "__main__":
    main()
