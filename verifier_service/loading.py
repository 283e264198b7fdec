"""From settings to a target that can run: checkpoint, weights in the chosen format, operations, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.cpu.simd import LANES
from kernels.linear import WeightFormat
from kernels.registry import Implementation, load_ops
from kernels.rejection_sample import RowOutcome
from kernels.rejection_sample import cpu as compiled_sampling
from kernels.rejection_sample import reference as reference_sampling
from service_kit.checkpoint import Checkpoint
from service_kit.cpu import available_cores, cpu_name
from service_kit.errors import ConfigurationError
from verifier_service.config import TargetConfig
from verifier_service.model import TargetModel
from verifier_service.settings import VerifierSettings
from verifier_service.weights import load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedTarget:
    """A target and what there is to say about it."""

    model: TargetModel
    accept_row: Callable[..., RowOutcome]
    """`kernels.rejection_sample`'s rule in the implementation chosen."""
    name: str
    """As the settings gave it."""
    fingerprint: str
    weight_format: WeightFormat
    device: str
    """In words, with CPU capability and threads."""


def load_target(settings: VerifierSettings, cache_dir: Path) -> LoadedTarget:
    """Loads the target. Call it on the thread that will run it: torch's thread count belongs to the caller's thread.

    Raises ConfigurationError, in words, for anything that cannot be served.
    """
    threads = settings.threads or available_cores()
    torch.set_num_threads(threads)
    weight_format: WeightFormat = "fp16" if settings.weight_format == "auto" else settings.weight_format
    checkpoint = Checkpoint(settings.model)
    config = TargetConfig.from_checkpoint(checkpoint)
    kernels = _kernels(settings, config)
    sampling = reference_sampling if settings.kernels == "reference" else compiled_sampling
    return LoadedTarget(
        model=TargetModel(config, load_weights(checkpoint, config, weight_format, cache_dir), load_ops(kernels)),
        accept_row=sampling.accept_row,
        name=settings.model,
        fingerprint=checkpoint.fingerprint,
        weight_format=weight_format,
        device=f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads",
    )


def _kernels(settings: VerifierSettings, config: TargetConfig) -> Implementation:
    if config.head_dim % LANES == 0 or settings.kernels == "reference":
        return settings.kernels
    if settings.kernels == "cpu":
        raise ConfigurationError(
            f"the compiled kernels need a head_dim that is a multiple of {LANES}, not {config.head_dim}: "
            "set kernels to reference",
            field="kernels",
        )
    logger.warning("head_dim %d is not a multiple of %d: using the slow reference kernels", config.head_dim, LANES)
    return "reference"
