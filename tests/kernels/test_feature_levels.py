"""Kernels compiled for other CPUs than this one, in a process of their own: AVX2, and x86 without any of it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import level_worker
import numpy as np
import pytest
import torch

from kernels.cpu.features import LEVEL

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or LEVEL == "generic", reason="compiles for x86 with AVX2"
)


def results_on(cpu: str, features: str, level: str, directory: Path) -> dict[str, torch.Tensor]:
    """What the worker computes when numba is told to compile for `cpu`."""
    out = directory / f"{level}.npz"
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, level_worker.__file__, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, level), done.stderr
    with np.load(out) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def test_avx2_and_this_cpu_give_the_same_bits(tmp_path: Path) -> None:
    there = results_on("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2,+sse4.1,+ssse3", "avx2", tmp_path)
    for name, here in level_worker.run().items():
        assert torch.equal(there[name], here), name


def test_without_vector_extensions_results_are_right_and_rows_exact(tmp_path: Path) -> None:
    """Without a fused multiply-add the rounding differs, so bits may differ from other CPUs', but not between rows."""
    there = results_on("x86-64", "", "generic", tmp_path)
    for name, here in level_worker.run().items():
        torch.testing.assert_close(there[name], here, rtol=1e-5, atol=1e-5)
        assert torch.equal(there[name][3], there[name][1]), name
    for name in ("fp16", "q4", "q8", "rms_norm", "silu_mul"):
        assert torch.equal(there[name][10], there[name][1]), name
    assert torch.equal(there["pages"], level_worker.run()["pages"])  # rounded without arithmetic
    # weights as small as float16 has them, and as large, each times one
    expected = level_worker.inputs() @ level_worker.weights().half().float().T
    torch.testing.assert_close(there["fp16"], expected, rtol=1e-5, atol=1e-5)
