"""Linear layers from the levels of a GGUF file kept beside a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.linear import Linear, make_quantized_linear
from service_kit.checkpoint import Checkpoint
from service_kit.errors import ConfigurationError
from service_kit.gguf_file import GROUP, GgufFile, Levels
from service_kit.gguf_llama import LlamaGguf

_CHECKED_EVERY = 16
"""Rows between those compared with the checkpoint: another model differs in all of them."""


class StoredLevels:
    """The levels that weight format q4 keeps as they are."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises ConfigurationError unless there is exactly one GGUF file of a Llama model."""
        paths = sorted(checkpoint.directory.glob("*.gguf"))
        if len(paths) != 1:
            raise ConfigurationError(
                f"{checkpoint.name}: weight format q4 takes its levels from one .gguf file beside the tensors, found "
                f"{len(paths)}: put the model's Q4_1 file there, or use weight format fp16",
                field="weight_format",
            )
        self._path = paths[0]
        self._gguf = LlamaGguf(GgufFile(self._path))

    def linear(self, names: Sequence[str], weight: Tensor, bias: Tensor | None) -> Linear:
        """One layer of the named weights below each other, which `weight` holds as floats.

        Raises ConfigurationError, or ValueError for levels that cannot be packed.
        """
        parts = [self._part(name) for name in names]
        sizes = [len(part.levels) for part in parts]
        if len({part.minimums is None for part in parts}) != 1 or sum(sizes) != len(weight):
            raise self._refused(names[0], "is stored unlike the weights it is computed with")
        for name, part, expected in zip(names, parts, torch.split(weight, sizes), strict=True):
            if not _are_levels_of(part, expected):
                raise self._refused(name, "does not fit the tensors beside it: they are of different models")
        minimums = [part.minimums for part in parts if part.minimums is not None]
        return make_quantized_linear(
            torch.from_numpy(np.concatenate([part.levels for part in parts])),
            torch.from_numpy(np.concatenate([part.scales for part in parts])),
            torch.from_numpy(np.concatenate(minimums)) if minimums else None,
            bias,
        )

    def _part(self, name: str) -> Levels:
        levels = self._gguf.levels(name) if name in self._gguf.names else None
        if levels is None:
            raise self._refused(name, "is not stored there as Q4_1 or Q8_0")
        if not all(np.isfinite(part).all() for part in (levels.scales, levels.minimums) if part is not None):
            raise self._refused(name, "has a scale that is NaN or infinite")
        return levels

    def _refused(self, name: str, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path.name}: {name} {reason}: use weight format fp16", field="weight_format")


def _are_levels_of(part: Levels, weight: Tensor) -> bool:
    """Whether `weight`, float16 or not yet quantised, is within half a level of what the levels say."""
    if part.levels.shape != weight.shape:
        return False
    sampled, expected = part.of_rows(slice(None, None, _CHECKED_EVERY)), weight[::_CHECKED_EVERY].numpy()
    half_level = np.abs(sampled.scales.astype(np.float32)).repeat(GROUP, axis=1) / 2
    return bool((np.abs(sampled.floats() - expected) <= 1.1 * half_level + 2**-8 * np.abs(expected)).all())
