"""Recorded kernel calls: run again they compute what the calls would, from what their inputs hold by then."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import native
from kernels.cpu.program import Program, recording
from kernels.linear import make_quantized_linear
from kernels.rms_norm import cpu


def test_a_program_runs_its_calls_in_order_on_what_is_in_memory() -> None:
    x, weight, normed, twice = torch.randn(3, 64), torch.rand(64), torch.zeros(3, 64), torch.zeros(3, 64)
    with recording() as made:
        cpu.rms_norm(x, weight, 1e-5, normed)
        cpu.rms_norm(normed, weight, 1e-5, twice)
    assert not normed.any(), "a recorded call does not run"
    program = Program(made)
    for _ in range(2):
        x.copy_(torch.randn(3, 64))
        program.run()
        expected = torch.empty(3, 64)
        cpu.rms_norm(x, weight, 1e-5, expected)
        assert torch.equal(normed, expected)
        cpu.rms_norm(normed, weight, 1e-5, expected)
        assert torch.equal(twice, expected)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_calls_share_their_scratch_and_threads_help(num_threads: int) -> None:
    levels = torch.randint(0, 16, (512, 512), dtype=torch.uint8)
    scales, minimums = torch.rand(512, 16).half(), torch.rand(512, 16).half()
    linear = make_quantized_linear(levels, scales, minimums, None)
    inputs, outputs = [torch.randn(rows, 512) for rows in (8, 1, 4)], [torch.empty(rows, 512) for rows in (8, 1, 4)]
    threads = native.num_threads()
    try:
        native.set_num_threads(num_threads)
        with recording() as made:
            for x, out in zip(inputs, outputs, strict=True):
                assert linear(x, out) is out
        Program(made).run()
        assert len(made.scratch) == 1
        for x, out in zip(inputs, outputs, strict=True):
            assert torch.equal(linear(x), out)
    finally:
        native.set_num_threads(threads)


def test_a_recording_ends_with_its_block() -> None:
    with pytest.raises(RuntimeError, match="stop"), recording():
        raise RuntimeError("stop")
    x, out = torch.ones(1, 16), torch.full((1, 16), torch.nan)
    cpu.rms_norm(x, torch.ones(16), 0.0, out)
    assert out.isfinite().all()
