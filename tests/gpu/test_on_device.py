"""What only a GPU can show: captured steps on CUDA give the reference's texts, and the prepared measurements run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_path import MODES, NUM_INVARIANT, texts

from service_kit.gpu import gpu_problem, probe_gpu

_PROBLEM = gpu_problem(probe_gpu())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_PROBLEM), reason=_PROBLEM or "there is a GPU")]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """Texts of the reference engine on the CPU."""
    return texts("reference")


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_those_of_the_reference(mode: str, expected: dict[str, list[list[int]]]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    found = texts("cuda", (mode,))[mode]
    assert found[:NUM_INVARIANT] == expected[mode][:NUM_INVARIANT]


def test_the_prepared_script_finds_nothing_wrong(tmp_path: Path) -> None:
    from bench.gpu import run

    parts = "parity,invariance,kernels,steps,fused,head share,overlap"
    assert run.main(["--only", parts, "--out", str(tmp_path / "gpu.json")]) == 0
