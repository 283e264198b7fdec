"""GPUs that cannot serve are refused in words, before any weight is read."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from service_kit.errors import ConfigurationError
from service_kit.gpu import GpuFacts, choose_device, gpu_problem, probe_gpu

GOOD = GpuFacts("NVIDIA H100", (9, 0), True, 70 * 2**30, 80 * 2**30)
GIB = 2**30


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


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_says_what_to_install() -> None:
    facts = probe_gpu()
    assert isinstance(facts, str)
    assert "has no CUDA: install a CUDA build" in facts
