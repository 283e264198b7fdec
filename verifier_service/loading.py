"""From settings to a target that can run: checkpoint, weights in the chosen format, operations, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.registry import fit_head_dim, load_ops, use_threads
from kernels.rejection_sample import RowOutcome
from kernels.rejection_sample import cpu as compiled_sampling
from kernels.rejection_sample import reference as reference_sampling
from service_kit.checkpoint import Checkpoint
from service_kit.cpu import available_cores, cpu_name
from service_kit.errors import ConfigurationError
from verifier_service.config import TargetConfig
from verifier_service.model import TargetModel
from verifier_service.settings import VerifierSettings
from verifier_service.weights import TargetWeights, WeightFormat, load_weights

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


def load_target(settings: VerifierSettings) -> LoadedTarget:
    """Loads the target. Call it on the thread that will run it: torch's thread count belongs to the caller's thread.

    Raises ConfigurationError, in words, for anything that cannot be served.
    """
    threads = settings.threads or available_cores()
    use_threads(threads)
    checkpoint = Checkpoint(settings.model)
    config = TargetConfig.from_checkpoint(checkpoint)
    try:
        kernels = fit_head_dim(settings.kernels, config.head_dim)
    except ValueError as error:
        raise ConfigurationError(f"{settings.model}: {error}", field="kernels") from error
    weight_format, weights = _load_weights(settings, checkpoint, config)
    sampling = reference_sampling if settings.kernels == "reference" else compiled_sampling
    return LoadedTarget(
        model=TargetModel(config, weights, load_ops(kernels)),
        accept_row=sampling.accept_row,
        name=settings.model,
        fingerprint=checkpoint.fingerprint,
        weight_format=weight_format,
        device=f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads",
    )


def _load_weights(
    settings: VerifierSettings, checkpoint: Checkpoint, config: TargetConfig
) -> tuple[WeightFormat, TargetWeights]:
    """Weights in the format asked for. "auto" depends on the files alone, so that a restart cannot change a text."""
    if settings.weight_format != "auto":
        return settings.weight_format, load_weights(checkpoint, config, settings.weight_format)
    if any(checkpoint.directory.glob("*.gguf")):
        try:
            return "q4", load_weights(checkpoint, config, "q4")
        except ConfigurationError as error:
            logger.info("weight format fp16: %s", error)
    return "fp16", load_weights(checkpoint, config, "fp16")
