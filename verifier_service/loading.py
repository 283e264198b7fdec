"""From settings to a target that can run: checkpoint, weights in the chosen format, operations, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.features import LEVEL, Level, describe
from kernels.registry import fit_head_dim, load_ops, use_threads
from kernels.rejection_sample import RowOutcome
from kernels.rejection_sample import cpu as compiled_sampling
from kernels.rejection_sample import reference as reference_sampling
from service_kit.checkpoint import Checkpoint
from service_kit.cpu import choose_threads, cpu_name
from service_kit.errors import ConfigurationError
from verifier_service.config import TargetConfig
from verifier_service.model import TargetModel
from verifier_service.self_test import apply_self_test
from verifier_service.settings import VerifierSettings
from verifier_service.weights import TargetWeights, WeightFormat, load_weights

_DEFAULT_FORMATS: dict[Level, tuple[WeightFormat, WeightFormat]] = {
    "avx512": ("q4", "fp16"),
    "avx2": ("q4", "fp16"),
    "generic": ("q4", "fp16"),
}
"""What "auto" takes: the first where the files have it, else the second. By measurement (docs/performance.md), but
fixed here: a timing at start could choose another format after a restart, and so change a text."""

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
    weight_format_reason: str
    """Why this one, in words."""
    device: str
    """In words, with vector instructions and threads."""
    inexact_reason: str
    """Why a row's result may depend on the rows beside it, in words; empty when it does not."""


def load_target(settings: VerifierSettings, cache_dir: Path | None = None) -> LoadedTarget:
    """Loads the target. Call it on the thread that will run it: torch's thread count belongs to the caller's thread.

    What its self-test finds is kept in `cache_dir`, if that is given. Raises ConfigurationError, in words, for anything
    that cannot be served.
    """
    threads = choose_threads(settings.threads, "DSPARK_VERIFIER_THREADS")
    use_threads(threads, settings.spin_us)
    checkpoint = Checkpoint(settings.model)
    config = TargetConfig.from_checkpoint(checkpoint)
    try:
        kernels = fit_head_dim(settings.kernels, config.head_dim)
    except ValueError as error:
        raise ConfigurationError(f"{settings.model}: {error}", field="kernels") from error
    weight_format, reason, weights = _load_weights(settings, checkpoint, config)
    logger.info("kernels %s: %s; weight format %s: %s", kernels, describe(), weight_format, reason)
    model = TargetModel(config, weights, load_ops(kernels))
    findings = apply_self_test(
        model,
        {"model": checkpoint.fingerprint, "weight format": weight_format, "kernels": kernels},
        cache_dir / f"self-test-{checkpoint.fingerprint[:8]}-{weight_format}.json" if cache_dir else None,
    )
    sampling = reference_sampling if settings.kernels == "reference" else compiled_sampling
    return LoadedTarget(
        model=model,
        accept_row=sampling.accept_row,
        name=settings.model,
        fingerprint=checkpoint.fingerprint,
        weight_format=weight_format,
        weight_format_reason=reason,
        device=f"{cpu_name()}, {describe()}, {threads} threads",
        inexact_reason=findings.inexact_reason,
    )


def _load_weights(
    settings: VerifierSettings, checkpoint: Checkpoint, config: TargetConfig
) -> tuple[WeightFormat, str, TargetWeights]:
    """Weights in the format asked for, and why that one. "auto" depends on CPU and files alone."""
    if settings.weight_format != "auto":
        return settings.weight_format, "as set", load_weights(checkpoint, config, settings.weight_format)
    preferred, otherwise = _DEFAULT_FORMATS[LEVEL]
    try:
        return preferred, f"the default for {LEVEL}", load_weights(checkpoint, config, preferred)
    except ConfigurationError as error:  # one that is not the format's fault meets the other format, too
        reason = f"{preferred} cannot be had: {error}"
    return otherwise, reason, load_weights(checkpoint, config, otherwise)
