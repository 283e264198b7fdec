"""Weight formats of a drafter: q8's rounding, and drafts that hardly differ from those of float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_harness import TARGET, VANILLA_DRAFTER, DrafterHarness, make_checkpoint

from drafter_service.weights import rounded_to_levels
from kernels.sampling import Regime
from service_kit.errors import ConfigurationError

CONTEXT_LEN = 20


def test_levels_are_the_nearest_multiples_of_their_scale() -> None:
    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    weight[2, 32:64] = 0.0
    weight[3, :32] *= 1e-9  # below what a float16 scale can tell from 0
    levels, scales = rounded_to_levels(weight)
    assert (levels.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float16, (7, 3))
    steps = scales.float().repeat_interleave(32, dim=1)
    error = (levels * steps - weight).abs()
    assert (error <= 0.501 * steps + 1e-7).all()
    assert int(levels.abs().max()) == 127
    assert not levels[2, 32:64].any()


def test_widths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="fp16"):
        rounded_to_levels(torch.zeros(4, 40))


def _base_logits(weight_format: str) -> np.ndarray:
    with DrafterHarness(VANILLA_DRAFTER, TARGET, weight_format=weight_format) as harness:
        size = harness.model.config.feature_size
        features = np.random.default_rng(0).standard_normal((CONTEXT_LEN, size)).astype(np.float32)
        harness.admit(0, Regime.GREEDY, pages=[0, 1, 2])
        harness.write_features(0, 0, features, step_id=1)
        harness.draft(ingests=[(0, 0, CONTEXT_LEN, 1, 1)], rows=[(0, 3, CONTEXT_LEN, 1)], num_drafts=4)
        logits: np.ndarray = harness.last_forward.base_logits.numpy().copy()
        return logits


@pytest.mark.parametrize(("weight_format", "error"), [("fp16", 2e-3), ("q8", 0.1)])
def test_formats_give_nearly_the_same_logits(weight_format: str, error: float) -> None:
    expected, logits = _base_logits("float32"), _base_logits(weight_format)
    difference = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 0.0 < difference < error


def test_a_weight_beyond_the_format_is_named(tmp_path: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.0.mlp.down_proj.weight"] = np.full_like(
            tensors["layers.0.mlp.down_proj.weight"].astype(np.float32), 1e7
        )

    drafter = make_checkpoint(tmp_path / "drafter", {}, edit)
    for weight_format in ("fp16", "q8"):
        with pytest.raises(ConfigurationError, match=r"layers.0.mlp.down_proj.*float32"):
            DrafterHarness(drafter, TARGET, weight_format=weight_format)
