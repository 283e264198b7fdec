"""From settings to a target that can run: checkpoint, weights in the chosen format, operations, threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.cpu.features import LEVEL, Level, describe
from kernels.kv_pages import page_type
from kernels.linear.dense import Placement
from kernels.registry import fit_head_dim, load_ops, use_threads
from kernels.rejection_sample import RowOutcome
from kernels.sampling_ops import load_sampling_ops
from kernels.triton.check import interpreter_problem
from service_kit.checkpoint import Checkpoint
from service_kit.cpu import choose_threads, cpu_name
from service_kit.errors import ConfigurationError
from service_kit.gpu import Gpu, choose_device, open_gpu
from service_kit.graphs import tiers
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
    verify_lens: Callable[..., None]
    """`kernels.verify_lens`'s."""
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
    gpu: Gpu | None = None
    """What it runs on; None for the CPU."""

    def padded_rows(self, num_rows: int) -> int:
        """Rows that are really computed for `num_rows` rows: a tier on a GPU."""
        if self.gpu is None:
            return self.model.weights.padded_rows(num_rows)
        return next(tier for tier in tiers(2 * num_rows) if tier >= num_rows)


def load_target(settings: VerifierSettings, cache_dir: Path | None = None) -> LoadedTarget:
    """Loads the target. Call it on the thread that will run it: torch's thread count belongs to the caller's thread.

    What its self-test finds is kept in `cache_dir`, if that is given. Raises ConfigurationError, in words, for anything
    that cannot be served.
    """
    threads = choose_threads(settings.threads, "DSPARK_VERIFIER_THREADS")
    use_threads(threads, settings.spin_us)
    checkpoint = Checkpoint(settings.model)
    config = TargetConfig.from_checkpoint(checkpoint)
    facts = choose_device(settings.device, "DSPARK_VERIFIER_DEVICE", lambda: 2 * checkpoint.num_values)
    if facts is not None:
        return load_on_device(settings, checkpoint, config, open_gpu(facts))
    if settings.kernels == "triton" and (problem := interpreter_problem()):
        raise ConfigurationError(f"DSPARK_VERIFIER_KERNELS=triton: {problem}; or set it to auto", field="kernels")
    try:
        kernels = fit_head_dim(settings.kernels, config.head_dim)
    except ValueError as error:
        raise ConfigurationError(f"{settings.model}: {error}", field="kernels") from error
    weight_format, reason, weights = _load_weights(settings, checkpoint, config)
    logger.info("kernels %s: %s; weight format %s: %s", kernels, describe(), weight_format, reason)
    model = TargetModel(config, weights, load_ops(kernels), page_type(weight_format, kernels))
    sampling_ops = load_sampling_ops(settings.kernels)
    findings = apply_self_test(
        model,
        {"model": checkpoint.fingerprint, "weight format": weight_format, "kernels": kernels},
        cache_dir / f"self-test-{checkpoint.fingerprint[:8]}-{weight_format}.json" if cache_dir else None,
    )
    return LoadedTarget(
        model=model,
        accept_row=sampling_ops.accept_row,
        verify_lens=sampling_ops.verify_lens,
        name=settings.model,
        fingerprint=checkpoint.fingerprint,
        weight_format=weight_format,
        weight_format_reason=reason,
        device=f"{cpu_name()}, {describe()}, {threads} threads",
        inexact_reason=findings.inexact_reason,
    )


def load_on_device(settings: VerifierSettings, checkpoint: Checkpoint, config: TargetConfig, gpu: Gpu) -> LoadedTarget:
    """Puts the target on a device, in bfloat16 unless float32 is asked for, with Triton's kernels around it.

    Raises ConfigurationError for settings that only the CPU has.
    """
    if settings.weight_format not in ("auto", "bf16", "float32"):
        raise ConfigurationError(
            f"weight_format {settings.weight_format} is for the CPU: on a GPU set bf16 or float32",
            field="weight_format",
        )
    if settings.kernels not in ("auto", "triton"):
        raise ConfigurationError(
            f"kernels {settings.kernels} are for the CPU: on a GPU set auto or triton", field="kernels"
        )
    weight_format: WeightFormat = "float32" if settings.weight_format == "float32" else "bf16"
    dtype = torch.float32 if weight_format == "float32" else torch.bfloat16
    weights = load_weights(checkpoint, config, weight_format, Placement(gpu.device, dtype))
    logger.info("%s on %s in %s; %.0f MiB are left", settings.model, gpu.words, weight_format, gpu.free_bytes() / 2**20)
    return LoadedTarget(
        model=TargetModel(config, weights, load_ops("triton")),
        accept_row=load_sampling_ops("cpu").accept_row,
        verify_lens=load_sampling_ops("triton").verify_lens,
        name=settings.model,
        fingerprint=checkpoint.fingerprint,
        weight_format=weight_format,
        weight_format_reason="the default on a GPU" if settings.weight_format == "auto" else "as set",
        device=gpu.words,
        inexact_reason="the GPU's matrix products choose their order of summation by the number of rows",
        gpu=gpu,
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
