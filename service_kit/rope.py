"""Rotary position tables from a model's configuration, for the target and the drafter alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from service_kit.errors import ConfigurationError

_STATIC_ROPE_TYPES = ("linear", "llama3", "yarn")
"""Types besides "default" whose frequencies do not depend on the length of the sequence at hand."""


class RopeTables(NamedTuple):
    """Angles of every position. The two halves of a head share them: (x₁, x₂) → (x₁ cos − x₂ sin, x₂ cos + x₁ sin)."""

    cos: Tensor  # [num_positions, head_dim / 2], float32, attention scaling included
    sin: Tensor  # [num_positions, head_dim / 2], float32, attention scaling included


def rope_tables(config: Any, num_positions: int) -> RopeTables:
    """Tables of a `transformers` configuration for positions 0 ... num_positions - 1.

    Raises ConfigurationError naming the rope type (or key) that would change the forward and is not implemented.
    """
    parameters = dict(config.rope_parameters or {})
    rope_type = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigurationError(
            f"rope_parameters.partial_rotary_factor {parameters['partial_rotary_factor']} is not implemented: "
            "only 1.0 (whole heads) is",
            field="rope_parameters",
        )
    if rope_type == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse_frequencies, scaling = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    elif rope_type in _STATIC_ROPE_TYPES:
        inverse_frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    else:
        raise ConfigurationError(
            f"rope_type {rope_type!r} is not implemented: use one of default, {', '.join(_STATIC_ROPE_TYPES)}",
            field="rope_parameters",
        )
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies)
    return RopeTables(angles.cos() * scaling, angles.sin() * scaling)
