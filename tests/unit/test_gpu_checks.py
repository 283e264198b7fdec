"""GPUs that cannot serve are refused in words, before any weight is read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from drafter_service.loading import load_drafter
from drafter_service.settings import DrafterSettings
from kernels.triton.check import triton_problem
from service_kit import gpu
from service_kit.errors import ConfigurationError
from service_kit.gpu import GpuFacts, choose_device, gpu_problem, probe_gpu
from verifier_service.loading import load_target
from verifier_service.settings import VerifierSettings

GOOD = GpuFacts("NVIDIA H100", (9, 0), True, 70 * 2**30, 80 * 2**30)
GIB = 2**30
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("torch finds no CUDA device", "torch finds no CUDA device"),
        (replace(GOOD, capability=(7, 5)), "has compute capability 7.5, 8.0 is needed"),
        (replace(GOOD, has_bfloat16=False), "does not compute in bfloat16"),
        (replace(GOOD, triton_problem="it is not installed"), "Triton does not work: it is not installed"),
        (replace(GOOD, free_bytes=8 * GIB), "weights need 16.0 GiB .* free 8.6 GiB, or choose a model of at most 7.4"),
    ],
)
def test_what_cannot_serve_is_refused_or_left_for_the_cpu(
    facts: GpuFacts | str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=f"DSPARK_VERIFIER_DEVICE=cuda: .*{words}.*; or set") as caught:
        choose_device("cuda", "DSPARK_VERIFIER_DEVICE", lambda: 16 * GIB, lambda: facts)
    assert caught.value.field == "device"
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto", "DSPARK_VERIFIER_DEVICE", lambda: 16 * GIB, lambda: facts) is None
    assert "serving on the CPU (DSPARK_VERIFIER_DEVICE=auto)" in caplog.text


def test_a_good_gpu_is_taken_and_the_cpu_asks_nothing() -> None:
    assert choose_device("cuda", "X", lambda: 16 * GIB, lambda: GOOD) == GOOD
    assert choose_device("auto", "X", lambda: 16 * GIB, lambda: GOOD) == GOOD

    def probe() -> GpuFacts:
        raise AssertionError("asked")

    assert choose_device("cpu", "X", lambda: 0, probe) is None
    assert gpu_problem(GOOD, 16 * GIB) == ""


def test_services_of_one_process_find_each_others_regions() -> None:
    """CUDA refuses to open a region in the process that made it."""
    names = ("CudaGraphRunner", "CudaMemory")
    with mock.patch.multiple("service_kit.gpu", **dict.fromkeys(names, object)):
        gpu._memory.cache_clear()
        verifiers, drafters = gpu.open_gpu(GOOD), gpu.open_gpu(GOOD)
        gpu._memory.cache_clear()
    assert verifiers.memory is drafters.memory
    assert verifiers.runner is not drafters.runner


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_says_what_to_install() -> None:
    facts = probe_gpu()
    assert isinstance(facts, str)
    assert "has no CUDA: install a CUDA build" in facts


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch believe in a GPU; changes are functions of torch.cuda."""

    def install(triton: str = "", **changes: Callable[..., Any]) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        functions = {
            "is_available": lambda: True,
            "mem_get_info": lambda: (70 * GIB, 80 * GIB),
            "get_device_capability": lambda: (9, 0),
            "get_device_name": lambda: "NVIDIA H100",
            "is_bf16_supported": lambda including_emulation: True,
        }
        for name, function in {**functions, **changes}.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr("kernels.triton.check.triton_problem", lambda: triton)

    return install


def broken() -> Any:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with ...")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_available": lambda: False}, "torch finds no CUDA device"),
        ({"mem_get_info": broken}, "the CUDA device cannot be used: CUDA error: all CUDA-capable devices are busy"),
        ({"get_device_capability": lambda: (7, 5)}, "compute capability 7.5, 8.0 is needed"),
        ({"is_bf16_supported": lambda including_emulation: including_emulation}, "does not compute in bfloat16"),
        ({"triton": "RuntimeError: no C compiler"}, "Triton does not work: RuntimeError: no C compiler"),
        ({"mem_get_info": lambda: (GIB // 2, 80 * GIB)}, "0.5 GiB of NVIDIA H100 are free"),
    ],
)
def test_both_executors_refuse_a_gpu_before_they_read_weights(
    fake_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    fake_cuda(**changes)
    for package in ("verifier_service", "drafter_service"):
        monkeypatch.setattr(f"{package}.loading.load_weights", lambda *_: pytest.fail("weights are read"))
    for name, load in (
        ("VERIFIER", lambda: load_target(VerifierSettings(model=str(GOLDEN / "target"), device="cuda"))),
        ("DRAFTER", lambda: load_drafter(draft_settings(device="cuda"))),
    ):
        with pytest.raises(ConfigurationError, match=f"DSPARK_{name}_DEVICE=cuda: .*{words}.*to cpu or auto"):
            load()


def draft_settings(**changes: Any) -> DrafterSettings:
    return DrafterSettings(model=str(GOLDEN / "draft_vanilla"), target=str(GOLDEN / "target"), threads=1, **changes)


def test_a_fit_gpu_is_described(fake_cuda: Callable[..., None]) -> None:
    fake_cuda()
    facts = probe_gpu()
    assert facts == GOOD
    assert str(facts) == "NVIDIA H100, sm_90"  # of measured costs' fingerprint: what is free now must not be in it


def test_triton_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        assert "CUDA" in triton_problem()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_problem() == "it only interprets kernels: unset TRITON_INTERPRET"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "it is not installed" in triton_problem()


def test_triton_kernels_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for words in ("set TRITON_INTERPRET=1; or set it to auto", "Triton is not installed .*; or set it to auto"):
        with pytest.raises(ConfigurationError, match=f"DSPARK_VERIFIER_KERNELS=triton: .*{words}"):
            load_target(VerifierSettings(model=str(GOLDEN / "target"), kernels="triton"))
        with pytest.raises(ConfigurationError, match=f"DSPARK_DRAFTER_KERNELS=triton: .*{words}"):
            load_drafter(draft_settings(kernels="triton"))
        monkeypatch.setitem(sys.modules, "triton", None)
