"""Runs kernels on fixed inputs and prints the bits: what `test_feature_levels` starts for each kind of CPU."""

from __future__ import annotations

import sys

import numpy as np
import torch

from kernels.cpu.features import LEVEL
from kernels.linear import make_linear, make_quantized_linear
from kernels.paged_attention import cpu as paged_attention
from kernels.rms_norm import cpu as rms_norm
from kernels.silu_mul import cpu as silu_mul

NUM_OUT, NUM_IN = 70, 96


def weights() -> torch.Tensor:
    """Normal, with float16's subnormal numbers, zeros of both signs and its largest."""
    weight = torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(0))
    weight[0, :6] = torch.tensor([0.0, -0.0, 6e-8, -3e-6, 6e-5, 65504.0])
    return weight


def inputs() -> torch.Tensor:
    """Eleven rows: more than a tile of any CPU and no whole number of tiles. The fourth and the last are the second."""
    x = torch.randn(11, NUM_IN, generator=torch.Generator().manual_seed(1))
    x[3] = x[10] = x[1]
    return x


def halves_at_risk(x: torch.Tensor) -> torch.Tensor:
    """K and V for float16: some half way between neighbours, subnormal or out of range."""
    kv = x.clone()
    kv[0, :6] = kv[0, -6:] = torch.tensor([65519.0, -65520.0, 2049.0, -2051.0, 3 * 2**-25, -(2**-25)])
    kv[2] *= torch.logspace(-8, 6, NUM_IN)
    return kv


def run() -> dict[str, torch.Tensor]:
    """Results by name."""
    x, generator = inputs(), np.random.default_rng(2)
    levels = torch.from_numpy(generator.integers(0, 16, (NUM_OUT, NUM_IN), np.uint8))
    scales = torch.from_numpy(generator.normal(size=(NUM_OUT, NUM_IN // 32)).astype(np.float16))
    normed, activated = torch.empty_like(x), torch.empty(len(x), NUM_IN // 2)
    rms_norm.rms_norm(x, x[0].contiguous(), 1e-5, normed)
    silu_mul.silu_mul(x, activated)
    pages, where = torch.zeros(4, 1, NUM_IN // 2, 16, dtype=torch.float16), torch.arange(4, dtype=torch.int32)
    written = pages.transpose(2, 3).contiguous()
    tables = where[:, None].contiguous(), torch.ones(4, NUM_IN // 4), torch.zeros(4, NUM_IN // 4)
    paged_attention.write_context(halves_at_risk(x[:4]), 0 * where, where, *tables, pages, written, None, 1e-5)
    return {
        "pages": torch.cat((pages[:, 0, :, 0], written[:, 0, 0]), dim=1).float(),
        "fp16": make_linear(weights(), None, "fp16")(x),
        "q4": make_quantized_linear(levels, scales, -8 * scales, None)(x),
        "q8": make_quantized_linear((levels.short() * 17 - 128).to(torch.int8), scales, None, None)(x),
        "rms_norm": normed,
        "silu_mul": activated,
    }


if __name__ == "__main__":
    print(LEVEL)
    np.savez(sys.argv[1], **{name: result.numpy() for name, result in run().items()})
